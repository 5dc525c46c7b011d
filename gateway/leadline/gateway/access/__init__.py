"""Who may send a request, and how much.

principal    the caller of a request: tenant, class, models, limits
key_file     the keys file
keys         KeyRing: a key to its caller; reloads the file when it changes
limits       RateLimits: requests and tokens per minute of each key
window       the arithmetic of a sliding minute, and counters of this process
shared       the same counters in Redis, for all gateways together

Import the modules, not this package.
"""
