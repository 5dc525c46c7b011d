"""The operator's side of the Kubernetes API: requests, the copy of the cluster, the work queue, the Lease.

kinds                    the kinds that the operator reads and writes, and their API paths
api                      requests to the API server
store                    a copy of our objects, kept current by watches and lists
queue                    the services to reconcile, each by one worker at a time
leader                   the Lease that decides which replica acts
drift                    which objects differ from what the operator applied
limit_ranges             the resources that a namespace gives to containers that request none
terminating_namespaces   namespaces that are being deleted, where nothing more is created
"""

__all__: list[str] = []
