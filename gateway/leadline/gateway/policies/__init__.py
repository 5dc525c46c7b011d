"""Routing policies: which of the eligible pods gets a request.

base            RoutingPolicy (one method, pick), RouteRequest, Decision, PodScore
prefix          expected seconds to first token: the default
least_load      fewest requests
session         rendezvous hashing with bounded load
random_choice   any pod
registry        load_policy(name): ours and other packages', by entry point

README.md beside this file says when to use which. Import the modules, not this package.
"""
