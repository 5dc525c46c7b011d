"""The Deployment, and the PodDisruptionBudget that keeps node drains from taking all of its pods at once.

Why a Deployment and not pods of our own: docs/decisions/007-a-deployment-runs-the-pods.md.
"""

from __future__ import annotations

from typing import Any

from leadline.operator.names import selector_labels
from leadline.operator.objects.context import Object, ServiceContext, secret_digest
from leadline.operator.objects.pod import pod_template
from leadline.protocol.isvc import label

__all__ = ["workload_objects"]

_SLACK_SECONDS = 600
"""Between the longest start-up that is allowed and the rollout being called stuck: scheduling, image pull."""


def _login_digest(context: ServiceContext) -> Object:
    """An annotation that changes with the Redis password, for a Secret is not read back: it is applied with
    the Deployment. Not in the template, since pods read the password again at each connection."""
    login = context.redis_login
    if login is None:
        return {}
    return {"annotations": {label("redis-hash"): secret_digest("\n".join(login), context.uid)}}


def workload_objects(context: ServiceContext) -> list[Object]:
    rollout = context.spec.rollout
    spec: dict[str, Any] = {
        "selector": {"matchLabels": selector_labels(context.name)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": context.spec.engine.startup_seconds + _SLACK_SECONDS,
        "template": pod_template(context),
    }
    if not context.replicas_owned_elsewhere:
        spec["replicas"] = context.replicas
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": context.metadata(context.child),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": selector_labels(context.name)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": context.metadata(context.child, **_login_digest(context)),
            "spec": spec,
        },
    ]
