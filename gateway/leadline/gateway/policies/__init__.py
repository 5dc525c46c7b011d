"""Routing policies: which of the eligible pods gets a request.

base            RoutingPolicy (one method, pick), RouteRequest, Decision, PodScore; load_policy(name)
prefix          expected seconds to first token: the default
least_load      fewest requests
session         rendezvous hashing with bounded load
random_choice   any pod

README.md beside this file says when to use which. Import the modules, not this package.
"""
