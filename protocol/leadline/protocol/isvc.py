"""Names of the InferenceService resource: group, version, labels, condition types and reasons. Its fields are
in isvc_types.py.

The Kubernetes API conventions ask that condition types and reasons be CamelCase words which programs may
compare; they are part of the API and never change their meaning.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "API_VERSION",
    "ASLEEP_ANNOTATION",
    "FIELD_MANAGER",
    "GROUP",
    "KIND",
    "OPERATOR_LABEL",
    "PLURAL",
    "SHORT_NAME",
    "SINGULAR",
    "VERSION",
    "ConditionType",
    "Reason",
    "label",
]

GROUP = "serving.leadline.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
SINGULAR = "inferenceservice"
PLURAL = "inferenceservices"
SHORT_NAME = "isvc"
FIELD_MANAGER = "leadline-operator"
"""Field manager of every server-side apply."""


def label(name: str) -> str:
    """Key of a label or annotation of ours: `serving.leadline.io/<name>`."""
    return f"{GROUP}/{name}"


ASLEEP_ANNOTATION = label("asleep")
"""On InferenceServices without replicas, by the operator: the next request starts a pod. A service without
replicas and without this annotation is off."""
OPERATOR_LABEL = label("operator")
"""On InferenceServices, by users: which operator is to look at it. On its Kubernetes Service, by that
operator: which gateways are to serve it."""


class ConditionType(StrEnum):
    """Types of `status.conditions`; True is the good state of each."""

    READY = "Ready"
    MODEL_AVAILABLE = "ModelAvailable"
    PROGRESSING = "Progressing"
    NAMES_ACCEPTED = "NamesAccepted"
    AUTOSCALING = "Autoscaling"
    """Of services with `autoscaling` alone."""


class Reason(StrEnum):
    """Why a condition is what it is."""

    READY = "Ready"
    SCALED_TO_ZERO = "ScaledToZero"
    ASLEEP = "Asleep"
    CREATING_PODS = "CreatingPods"
    DOWNLOADING = "Downloading"
    LOADING_WEIGHTS = "LoadingWeights"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_BLOCKED = "RolloutBlocked"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONFIG_FAILED = "ConfigFailed"
    CONFIG_ERROR = "ConfigError"
    POD_SETUP_FAILED = "PodSetupFailed"
    PODS_REFUSED = "PodsRefused"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_UNREACHABLE = "ModelUnreachable"
    UNAUTHORIZED = "Unauthorized"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    OUT_OF_MEMORY = "OutOfMemory"
    NOT_RESPONDING = "NotResponding"
    CRASH_LOOP = "CrashLoop"
    INVALID_SPEC = "InvalidSpec"
    NAME_TAKEN = "NameTaken"
    NAME_NOT_ALLOWED = "NameNotAllowed"
    NAMES_ACCEPTED = "NamesAccepted"
    APPLY_REFUSED = "ApplyRefused"
    AUTOSCALING_ACTIVE = "AutoscalingActive"
    STEPPED_ASIDE = "SteppedAside"
