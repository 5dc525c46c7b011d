"""How the pods are found, and by whom they may be reached."""

from __future__ import annotations

from typing import Any

from leadline.operator.names import PORT, PORT_NAME, selector_labels
from leadline.operator.objects.context import Object, ServiceContext
from leadline.protocol.isvc import OPERATOR_LABEL

__all__ = ["network_objects"]

_NAMESPACE = "kubernetes.io/metadata.name"


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
