"""The operator's side of the Kubernetes API: requests, the copy of the cluster, the work queue, the Lease.

kinds        the kinds that the operator reads and writes
api          requests to the API server, by kubernetes.aio
store        a copy of our objects, kept current by watches and lists
queue        the services to reconcile, each by one worker at a time
leader       the Lease that decides which replica acts
drift        which objects differ from what the operator applied
namespaces   which are being deleted, and what they give to containers that request nothing
"""

__all__: list[str] = []
