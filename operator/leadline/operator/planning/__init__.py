"""Decides what should exist for one InferenceService and what its status says. Pure: no request, no clock.

observed       everything that a decision reads, as one value
plan           the decision: objects, deletions, status, Events
conditions     the status conditions
diagnosis      why a pod does not serve
served_names   which names lead to which service
cache_claims   the volume claim of `cache` after the spec has changed
"""

__all__: list[str] = []
