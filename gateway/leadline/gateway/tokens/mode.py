"""Whether a service's prompts are matched by tokens or by text, and why by text."""

from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Gauge

from leadline.protocol.openai.service import PrefixMatching

__all__ = ["ASSUMED_TTL", "EVENTS_TTL", "ModeMetric", "Reason", "TokenMode"]

ASSUMED_TTL = 600.0
"""Seconds for which a pod is believed to hold what was sent to it, where it does not say what it holds, or
says it by names that we do not know."""
EVENTS_TTL = 5.0
"""The same where its cache events take over."""


class Reason(Enum):
    """Why by text. The values are labels of a metric."""

    CONFIGURED = "configured"
    """`tokenizer: approximate`."""
    NO_POD = "no_pod"
    """No pod was ready yet."""
    NOT_OFFERED = "not_offered"
    """The pods have no tokenizer to give: another engine, or an older one."""
    FORBIDDEN = "forbidden"
    """The pods want another key than `upstream.api_key`."""
    UNREACHABLE = "unreachable"
    """The pod asked did not answer as it should."""
    INVALID = "invalid"
    """What it gave is no tokenizer, too large, or not what its digest says."""
    DIFFERS = "differs"
    """With it, prompts came out otherwise than a pod's (P21)."""


@dataclass(frozen=True, slots=True)
class TokenMode:
    reason: Reason | None = Reason.NO_POD
    """None: exact."""
    detail: str = ""
    """For the log."""

    @property
    def exact(self) -> bool:
        return self.reason is None

    def card(self) -> PrefixMatching:
        """For /v1/models."""
        if self.reason is None:
            return PrefixMatching(by="tokens")
        return PrefixMatching(by="text", reason=self.reason.value)


class ModeMetric:
    """`leadline_gateway_text_matching`: 1 for the reason for which a service is matched by text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "leadline_gateway_text_matching",
            "1: the service's prompts are matched by text, not by tokens, for this reason",
            ["service", "reason"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._shown: dict[str, Reason | None] = {}

    def forget(self, service: str) -> None:
        """The service is gone."""
        self.show(service, TokenMode(None))
        del self._shown[service]

    def show(self, service: str, mode: TokenMode) -> None:
        before = self._shown.get(service)
        if before is not None:
            self._gauge.labels(service, before.value).set(0)
        if mode.reason is not None:
            self._gauge.labels(service, mode.reason.value).set(1)
        self._shown[service] = mode.reason
