"""The caller of a request, as its key describes it.

Read by admission (tenant, class), limits (numbers) and the proxy (models, name for logs).
"""

from dataclasses import dataclass

from leadline.gateway.errors import ModelForbidden
from leadline.gateway.services import Service

__all__ = ["ANONYMOUS", "Principal"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller."""

    tenant: str
    """Capacity is shared by tenant."""
    name: str
    """Of the key, for logs and metrics."""
    allowed_models: frozenset[str] | None = None
    """None: all. A last `*` in a name stands for anything."""
    priority_class: str = "interactive"
    requests_per_minute: int = 0
    """0: no limit."""
    tokens_per_minute: int = 0
    """Prompt and output together. 0: no limit."""

    def allows(self, model: str) -> bool:
        """Return whether the key may use a model, by the name in the request."""
        allowed = self.allowed_models
        if allowed is None or model in allowed:
            return True
        return any(name.endswith("*") and model.startswith(name[:-1]) for name in allowed)

    def require(self, model: str) -> None:
        """Raise ModelForbidden (403) unless the key `allows` the model."""
        if not self.allows(model):
            shown = model if len(model) <= 100 else model[:100] + "…"
            raise ModelForbidden(
                f"this key may not use the model {shown!r}; GET /v1/models lists those it may",
                param="model",
                code="model_not_allowed",
            )

    def require_service(self, model: str | None, service: Service) -> None:
        """Raise ModelForbidden (403) unless the key allows the model of a request to `service`. A request
        without a model means the only service there is: then the key must allow one of its names."""
        if self.allowed_models is None:
            return
        if model is not None:
            self.require(model)
            return
        names = [*service.served_names, *service.reported_names(), service.name]
        if not any(self.allows(name) for name in names):
            self.require(names[0])


ANONYMOUS = Principal(tenant="anonymous", name="anonymous")
