"""Names of the Redis keys of one service.

`leadline:{<namespace>/<service>}:<what>`: the braces are a Redis Cluster hash tag, which keeps all keys of a
service in one slot, so that scripts and transactions over them work.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServiceKeys"]


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """Key names of one service. Raises ValueError for names that would break the scheme."""

    namespace: str
    service: str

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("service", self.service)):
            if not value or set(value) & set("{}/:"):
                raise ValueError(f"{name} must not be empty or contain any of {{}}/: but is {value!r}")

    @property
    def prefix(self) -> str:
        return f"leadline:{{{self.namespace}/{self.service}}}"

    @property
    def events(self) -> str:
        """Capped stream of event batches of all pods."""
        return f"{self.prefix}:events"

    @property
    def pods(self) -> str:
        """Hash from pod name to its last load report."""
        return f"{self.prefix}:pods"

    def snapshot(self, pod: str) -> str:
        """The snapshot of one pod's cache (a string with a TTL)."""
        return f"{self.prefix}:snapshot:{pod}"
