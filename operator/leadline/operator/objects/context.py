"""What every object of a service is made from, and the answers that several of them need."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from leadline.operator.names import child_labels, child_name
from leadline.operator.redis_users import login_of, place_of
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import API_VERSION, KIND
from leadline.protocol.isvc_types import InferenceServiceSpec

__all__ = ["Object", "ServiceContext", "digest", "secret_digest"]

Object = dict[str, Any]


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value, equal for equal values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=4096)
def secret_digest(secret: str, salt: str) -> str:
    """As `digest`, but slow and salted: it may be seen by people who must not guess the secret from it."""
    return hashlib.scrypt(secret.encode(), salt=salt.encode(), n=1 << 12, r=8, p=1, dklen=8).hex()


@dataclass(slots=True, frozen=True)
class ServiceContext:
    name: str
    namespace: str
    uid: str
    spec: InferenceServiceSpec
    settings: OperatorSettings
    replicas_owned_elsewhere: bool = False
    """A HorizontalPodAutoscaler scales the Deployment itself: its `replicas` are not ours to set."""
    running: int | None = None
    """`replicas` of the Deployment there is; None without one."""
    limited: frozenset[str] = frozenset()
    """Resources that LimitRanges of the namespace give to containers that do not ask for them."""
    claim_class: str | None = None
    """Storage class that the service gave its cache claim; None: the cluster chose it."""

    @property
    def child(self) -> str:
        return child_name(self.name)

    @property
    def served_name(self) -> str:
        return self.spec.served_name or self.name

    @property
    def on_gpu(self) -> bool:
        return (self.spec.accelerator.type or self.settings.accelerator) == "gpu"

    @property
    def replicas(self) -> int:
        """Wanted pods. With `autoscaling`, spec.replicas is the autoscaler's last word, within its limits; 0
        says that the service sleeps or is off. Where the spec does not say, what runs stays; a new service
        gets 1."""
        replicas, scaling = self.spec.replicas, self.spec.autoscaling
        if replicas == 0:
            return 0
        if replicas is None:
            replicas = 1 if self.running is None else self.running
        return replicas if scaling is None else min(max(replicas, scaling.min, 1), scaling.max)

    @property
    def shares_cache_on_one_node(self) -> bool:
        """Whether the pods share a claim that one node at a time can mount."""
        cache = self.spec.cache
        return cache is not None and cache.claim_name is None and cache.access_mode == "ReadWriteOnce"

    @property
    def redis_place(self) -> str:
        """URL without user and password; empty: there is no Redis."""
        return place_of(self.settings)

    @property
    def redis_login(self) -> tuple[str, str] | None:
        """User and password of this service's engines."""
        return login_of(self.settings, (self.namespace, self.name), self.uid)

    def metadata(self, name: str, **more: Any) -> Object:
        """Of a child in the service's namespace. The owner reference makes Kubernetes delete it with the
        service, whether or not an operator is running (P6)."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": child_labels(self.name),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.name,
                    "uid": self.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
            **more,
        }
