"""Reads what a pod's own status does not say: its progress over HTTP, and the Events about it.

pod_probe        asks pods for /ready and /metrics
start_progress   follows pods that start, in steps of five percent
pod_events       looks up Events about pods that cannot start their containers
"""

__all__: list[str] = []
