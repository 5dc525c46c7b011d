"""Supporting objects: ServiceAccount, Service, NetworkPolicy, warm-up ConfigMap, Redis Secret, claim."""

from __future__ import annotations

import base64
from typing import Any

from leadline.operator.names import PORT, PORT_NAME, RETAIN_ANNOTATION, redis_secret_name, selector_labels
from leadline.operator.objects.context import Object, ServiceContext
from leadline.protocol.isvc import OPERATOR_LABEL

__all__ = ["network_objects", "support_objects", "warmup_text"]

_NAMESPACE = "kubernetes.io/metadata.name"


def warmup_text(context: ServiceContext) -> str:
    """The warm-up file: one prompt a line; empty without prompts."""
    return "".join(f"{prompt}\n" for prompt in context.spec.engine.warmup_prompts)


def support_objects(context: ServiceContext) -> list[Object]:
    objects = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": context.metadata(context.child),
            "automountServiceAccountToken": False,
        }
    ]
    if text := warmup_text(context):
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": context.metadata(context.child),
                "data": {"warmup.txt": text},
            }
        )
    if (login := context.redis_login) is not None:
        encoded = {
            name: base64.b64encode(value.encode()).decode()
            for name, value in zip(("username", "password"), login, strict=True)
        }
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": context.metadata(redis_secret_name(context.name)),
                "data": encoded,
            }
        )
    cache = context.spec.cache
    if cache is not None and cache.claim_name is None:
        claim: Object = {
            "accessModes": [cache.access_mode],
            "resources": {"requests": {"storage": str(cache.size)}},
        }
        if (storage_class := cache.storage_class or context.claim_class) is not None:
            claim["storageClassName"] = storage_class
        # Read from the claim when `cache`, and `retain` with it, has gone from the spec.
        more = {} if cache.retain else {"annotations": {RETAIN_ANNOTATION: "false"}}
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": context.metadata(context.child, **more),
                "spec": claim,
            }
        )
    return objects


def network_objects(context: ServiceContext) -> list[Object]:
    """The headless Service, whose EndpointSlices the gateway watches, and the NetworkPolicy."""
    objects: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _announcing(context),
            "spec": {
                "clusterIP": "None",
                "selector": selector_labels(context.name),
                "ports": [
                    {"name": PORT_NAME, "port": PORT, "targetPort": PORT_NAME, "protocol": "TCP"},
                ],
            },
        }
    ]
    if context.settings.network_policies:
        objects.append(_policy(context))
    return objects


def _announcing(context: ServiceContext) -> Object:
    """The Service's metadata, with the operator's name if it has one: the gateways of other operators, which
    the NetworkPolicy keeps out, leave it alone."""
    metadata = context.metadata(context.child)
    if operator := context.settings.operator_name:
        metadata["labels"] = metadata["labels"] | {OPERATOR_LABEL: operator}
    return metadata


def _policy(context: ServiceContext) -> Object:
    """The gateway, the operator (start-up progress) and monitoring may come in; the way out stays open, for
    models, Redis and DNS. The kubelet's probes are not subject to policies."""
    settings = context.settings
    sources = [
        _pods(settings.gateway_namespace or settings.own_namespace, settings.gateway_labels),
        _pods(
            settings.own_namespace,
            {"app.kubernetes.io/name": "leadline", "app.kubernetes.io/component": "operator"},
        ),
    ]
    if settings.monitoring_namespace:
        sources.append(_pods(settings.monitoring_namespace, {}))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": context.metadata(context.child),
        "spec": {
            "podSelector": {"matchLabels": selector_labels(context.name)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources, "ports": [{"port": PORT, "protocol": "TCP"}]}],
        },
    }


def _pods(namespace: str, labels: dict[str, str]) -> dict[str, Any]:
    source: dict[str, Any] = {"namespaceSelector": {"matchLabels": {_NAMESPACE: namespace}}}
    if labels:
        source["podSelector"] = {"matchLabels": labels}
    return source
