"""Which pods a service has.

discovery     Discovery: static lists and, with Kubernetes, watched EndpointSlices, into Service.pods
pod_set       the pods of one service, changed to what was found
slices        what EndpointSlices say of a service's pods
reflector     a local copy of the API server's objects, by list and watch
kube_api      the API server: where it is, who we are, requests

No Kubernetes client library: two GET requests are all it takes. Import the modules, not this package.
"""
