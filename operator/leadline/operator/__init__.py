"""The operator: InferenceService in, Kubernetes objects and status out.

    handlers       kopf's handlers: what runs when; start reading here
    main           the process
    controller     complete lists, the Lease, the workers, the tasks of the leader
    reconcile      one pass over one service: read the store, plan, apply
    autoscaling/   the number of replicas
    probes/        progress and Events of pods
    planning/      the pure decision
    objects/       the Kubernetes objects of a service; pure
    redis_users    the Redis user of each service
    kube/          the API server: requests, store, queue, Lease
    crd/           the CRD, generated from leadline.protocol.isvc_types

Imports go downwards in this list; import-linter checks it. Only the command line imports the operator, by
`leadline.operator.main` and `leadline.operator.options`.
"""

__all__: list[str] = []
