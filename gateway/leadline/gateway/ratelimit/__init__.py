"""Counting requests and tokens a minute.

window     the arithmetic of a sliding minute, and counters of this process
shared     the same counters in Redis, for all gateways together

`leadline.gateway.limits` puts them together. Import the modules, not this package.
"""
