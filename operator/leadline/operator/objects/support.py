"""What the pods lean on: ServiceAccount, warm-up prompts, the Redis URL, the claim for downloaded models."""

from __future__ import annotations

import base64

from leadline.operator.names import RETAIN_ANNOTATION, redis_secret_name
from leadline.operator.objects.context import Object, ServiceContext

__all__ = ["support_objects", "warmup_text"]


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
