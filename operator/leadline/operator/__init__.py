"""The operator room: InferenceService in, Kubernetes objects and status out.

    crd, schema                 the CRD, generated from leadline.protocol.isvc_types
    plan, objects/, diagnosis   pure: what should exist and what to say about what does
    api, store, queue, leader   the API server: requests, a copy of our objects, what needs a look, who acts
    reconcile, shell, main      one look at one object; kopf; the process

Nothing here is imported by other rooms but `leadline.operator.main`, by the command line.
"""

__all__: list[str] = []
