"""Which pods a service has.

discovery     Discovery: static lists and, with Kubernetes, watched EndpointSlices, into Service.pods
pod_set       the pods of one service, changed to what was found
slices        what EndpointSlices say of a service's pods
reflector     a local copy of the API server's objects, by list and watch of kubernetes.aio
kube_api      address and credentials of the API server
timing        how often, and for how long

Only kube_api and reflector import the Kubernetes client. Import the modules, not this package.
"""
