"""Which pods a service has.

discovery     Discovery: static lists and, with Kubernetes, watched EndpointSlices, into Service.pods
pod_set       the pods of one service, changed to what was found
slices        the pods of a service in EndpointSlices
reflector     a local copy of the API server's objects, by list and watch of kubernetes.aio
kube_api      address and credentials of the API server

Only kube_api and reflector import the Kubernetes client. Import the modules, not this package.
"""
