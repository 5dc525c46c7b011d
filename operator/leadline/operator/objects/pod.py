"""The pod template: one engine container over `tensorParallel` accelerators, after an init container that
downloads the model if it is the hub's; admitted by the restricted level of Pod Security.

Everything that writes goes to a volume, for the root file system is read-only:

    /cache     downloaded and converted models: the cache claim, or an emptyDir
    /tmp       scratch
    /dev/shm   shared memory of the ranks, in RAM
    /model     the claim of a pvc:// model, read-only
    /etc/leadline   warm-up prompts
    /etc/leadline-redis   user and password for Redis, read at each connection
"""

from __future__ import annotations

import difflib
from typing import Any

from leadline.operator.names import (
    CONTAINER,
    DOWNLOAD_CONTAINER,
    child_labels,
    redis_secret_name,
    selector_labels,
)
from leadline.operator.objects.containers import (
    PRE_STOP_SECONDS,
    add_default_requests,
    download_container,
    engine_container,
    is_downloaded,
)
from leadline.operator.objects.context import ServiceContext, digest
from leadline.operator.objects.strategic import strategic_merge
from leadline.operator.objects.support import warmup_text
from leadline.protocol.isvc import label

__all__ = ["mistyped_container", "pod_template"]

USER = 65532
"""User and group of the container, and group of its volumes. Images must not need another."""
_EXIT_SECONDS = 15
"""For the process to end after the drain."""


def pod_template(context: ServiceContext) -> dict[str, Any]:
    """The template, with the service's `podTemplate` patch over it. The patch cannot take away the labels
    that the selector needs."""
    template: dict[str, Any] = {
        "metadata": {"labels": child_labels(context.name), "annotations": _annotations(context)},
        "spec": _pod_spec(context),
    }
    if context.spec.pod_template:
        template = strategic_merge(template, context.spec.pod_template)
        required = selector_labels(context.name) | {
            "app.kubernetes.io/managed-by": child_labels(context.name)["app.kubernetes.io/managed-by"]
        }
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = {**(metadata.get("labels") or {}), **required}
    pod = template.get("spec") or {}
    add_default_requests(context, pod, _named(pod.get("containers"), CONTAINER))
    _share_resources(pod)
    return template


def mistyped_container(context: ServiceContext) -> str:
    """A sentence on the first container of the service's patch that is neither one of ours, by its name, nor
    a whole one, by its image; empty: there is none. Its name is mistyped, most likely."""
    patch = (context.spec.pod_template or {}).get("spec") or {}
    ours = {
        "containers": [CONTAINER],
        "initContainers": [DOWNLOAD_CONTAINER] if is_downloaded(context.spec.model) else [],
    }
    for field, names in ours.items():
        for item in patch.get(field) or []:
            name = item.get("name")
            if name is None or name in names or (item.get("image") and item.get("$patch") != "delete"):
                continue
            where = f"podTemplate.spec.{field}: {name!r}"
            if name == DOWNLOAD_CONTAINER and field == "initContainers":
                return f"{where} is there for hf:// models only: {context.spec.model!r} is not downloaded"
            home = next((other for other, known in ours.items() if name in known), "")
            if home:
                return f"{where} is one of {home}"
            near = difflib.get_close_matches(str(name), names, 1) or names
            hint = f": did you mean {near[0]!r}?" if near else ""
            return f"{where} has no image and is no container of the operator's{hint}"
    return ""


def _share_resources(pod: dict[str, Any]) -> None:
    """Give the download the engine's CPU and memory, unless the patch says what it gets. A pod asks for the
    larger of the two, so this takes nothing; and a pod with a container without limits is never of the class
    Guaranteed, which alone gets CPUs of its own."""
    engine = _named(pod.get("containers"), CONTAINER).get("resources") or {}
    download = _named(pod.get("initContainers"), DOWNLOAD_CONTAINER)
    shared = {}
    for kind in ("requests", "limits"):
        amounts = engine.get(kind) or {}
        if found := {name: amounts[name] for name in ("cpu", "memory") if name in amounts}:
            shared[kind] = found
    if download and shared and "resources" not in download:
        download["resources"] = shared


def _named(containers: list[dict[str, Any]] | None, name: str) -> dict[str, Any]:
    return next((one for one in containers or [] if one.get("name") == name), {})


def _annotations(context: ServiceContext) -> dict[str, str]:
    """Of what pods read only when they start: a change must start them anew."""
    annotations = {}
    if text := warmup_text(context):
        annotations[label("warmup-hash")] = digest(text)
    return annotations


def _pod_spec(context: ServiceContext) -> dict[str, Any]:
    spec, accelerator = context.spec, context.spec.accelerator
    pod: dict[str, Any] = {
        "serviceAccountName": context.child,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + spec.rollout.drain_seconds + _EXIT_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_placement(context),
        **({"initContainers": [download_container(context)]} if is_downloaded(spec.model) else {}),
        "containers": [engine_container(context)],
        "volumes": _volumes(context),
    }
    if accelerator.node_selector:
        pod["nodeSelector"] = dict(accelerator.node_selector)
    if accelerator.tolerations:
        names = {"toleration_seconds": "tolerationSeconds"}
        pod["tolerations"] = [
            {
                names.get(name, name): value
                for name in ("key", "operator", "value", "effect", "toleration_seconds")
                if (value := getattr(toleration, name)) is not None
            }
            for toleration in accelerator.tolerations
        ]
    if accelerator.runtime_class_name:
        pod["runtimeClassName"] = accelerator.runtime_class_name
    if spec.priority_class_name:
        pod["priorityClassName"] = spec.priority_class_name
    return pod


def _placement(context: ServiceContext) -> dict[str, Any]:
    """Spread pods over hosts where there is a choice: one lost node then costs the fewest. Pods that share a
    ReadWriteOnce claim go to one node instead, and both are preferences. As a requirement the affinity would
    keep a service from coming back while pods that cannot end still stand on a node that is lost."""
    selector = {"matchLabels": selector_labels(context.name)}
    if context.shares_cache_on_one_node:
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}
    return {
        "topologySpreadConstraints": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "maxSkew": 1,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": selector,
            }
        ]
    }


def _volumes(context: ServiceContext) -> list[dict[str, Any]]:
    spec = context.spec
    shared_memory = f"{1 + spec.tensor_parallel // 2}Gi"
    cache: dict[str, Any] = {"name": "cache", "emptyDir": {}}
    if spec.cache is not None:
        cache = {
            "name": "cache",
            "persistentVolumeClaim": {"claimName": spec.cache.claim_name or context.child},
        }
    volumes: list[dict[str, Any]] = [
        cache,
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
    ]
    if spec.model.startswith("pvc://"):
        claim = spec.model.removeprefix("pvc://").partition("/")[0]
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if spec.engine.warmup_prompts:
        volumes.append({"name": "config", "configMap": {"name": context.child}})
    if context.redis_login is not None:
        secret = {"secretName": redis_secret_name(context.name), "defaultMode": 0o440}
        volumes.append({"name": "redis", "secret": secret})
    return volumes
