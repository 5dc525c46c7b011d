"""Who asks: what a key stands for.

Room: gateway. Read by admission (tenant, class), limits (numbers) and the proxy (models, name for logs).
"""

from dataclasses import dataclass

from leadline.gateway.errors import ModelForbidden

__all__ = ["ANONYMOUS", "Principal"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    tenant: str
    """Shares of capacity go by it."""
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
        """Whether the key may use a model, by the name the client says."""
        allowed = self.allowed_models
        if allowed is None or model in allowed:
            return True
        return any(name.endswith("*") and model.startswith(name[:-1]) for name in allowed)

    def require(self, model: str) -> None:
        """Raises ModelForbidden (403) when `allows` says no."""
        if not self.allows(model):
            shown = model if len(model) <= 100 else model[:100] + "…"
            raise ModelForbidden(
                f"this key may not use the model {shown!r}; GET /v1/models lists those it may",
                param="model",
                code="model_not_allowed",
            )


ANONYMOUS = Principal(tenant="anonymous", name="anonymous")
