"""The Kubernetes objects of one InferenceService, each made by a pure function of `ServiceContext`.

context     spec, identity and settings, with the questions that several objects ask
containers  the engine's container and the download before it: arguments, environment, probes
pod         the pod template: containers, volumes, restricted security
workload    Deployment and PodDisruptionBudget
support     ServiceAccount, Service, NetworkPolicy, warm-up ConfigMap, Redis Secret, model cache claim
"""

from leadline.operator.objects.context import ServiceContext
from leadline.operator.objects.support import network_objects, support_objects
from leadline.operator.objects.workload import workload_objects

__all__ = ["ServiceContext", "network_objects", "support_objects", "workload_objects"]
