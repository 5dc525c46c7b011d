"""What the handlers share: the engine once there is one, and which phase of its life the server is in.

starting ──engine ready──▶ serving ──SIGTERM──▶ draining
    └──────── the core died, or never started ────────▶ failed
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from msgspec import UNSET, UnsetType

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import EngineDead, WrongTask
from leadline.engine.pooling.spec import Task
from leadline.engine.server.http.responses import ApiError
from leadline.engine.server.metrics.metrics import Metrics
from leadline.engine.server.settings import ServerSettings
from leadline.protocol.openai.service import StartProgress

__all__ = ["DRAINING", "Phase", "ServerState", "check_task"]

DRAINING = "the server is shutting down"


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class ServerState:
    settings: ServerSettings
    metrics: Metrics
    engine: AsyncEngine | None = None
    phase: Phase = Phase.STARTING
    detail: str = "the model is loading"
    """Start-up progress, or the reason of a failure, in one line."""
    started: StartProgress | None = None
    """How far the start has come, as of its last report."""
    page: Callable[[], Awaitable[bytes]] | None = None
    """/metrics of all API processes; None where this is the only one."""

    @property
    def progress(self) -> StartProgress | UnsetType:
        """Progress of the start for /health and /ready, until it has ended."""
        return self.started if self.phase is Phase.STARTING and self.started is not None else UNSET

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call the model: the served name first, then the aliases."""
        served = () if self.engine is None else (self.engine.served_name,)
        return tuple(dict.fromkeys((*served, *self.settings.aliases)))

    def check_model(self, name: str | None) -> None:
        """Raise the 404 of a model that is not served here; None: the one that is. Names are compared as they
        are, whatever is in them."""
        if name is not None and name not in self.names:
            others = ", ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {others}",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )

    def admit(self) -> AsyncEngine:
        """The engine, or the 503 that a new request gets now."""
        if self.phase is Phase.SERVING and self.engine is not None:
            try:
                self.engine.check_ready()
            except EngineDead as error:
                raise _unavailable(str(error), "engine_dead", retry_after=5) from None
            self.check_frozen()
            return self.engine
        if self.phase is Phase.DRAINING:
            raise _unavailable("the server is shutting down", "draining", retry_after=1)
        if self.phase is Phase.STARTING:
            raise _unavailable(f"not ready: {self.detail}", "loading", retry_after=5)
        raise _unavailable(f"the engine is gone: {self.detail}", "engine_dead", retry_after=5)

    def admit_for(self, task: Task) -> AsyncEngine:
        """As `admit`, for what only a model of that task does. Raises also WrongTask."""
        engine = self.admit()
        check_task(engine, task)
        return engine

    def check_frozen(self) -> None:
        """Raise a 503 if the core's process counts as frozen. It names no time to come back, which gateways
        take for a pod that is sick."""
        if self.engine is not None and self.engine.frozen is not None:
            raise ApiError(503, self.engine.frozen, type="server_error", code="engine_frozen")

    def ready(self) -> tuple[bool, str]:
        """(whether /ready says 200, why not)."""
        try:
            engine = self.admit()
        except ApiError as error:
            return False, error.message
        try:
            age = engine.check_ready()
        except EngineDead as error:
            return False, str(error)
        if age > self.settings.stall_seconds:
            return False, f"the engine's loop has not moved for {age:.0f} s"
        return True, "ready"

    def core_state(self) -> tuple[SchedulerStats, Speeds, float, bool] | None:
        """For the metrics: (stats, speeds, heartbeat age, ready)."""
        if self.engine is None:
            return None
        try:
            stats, speeds, age = self.engine.stats(), self.engine.speeds(), self.engine.check_ready()
        except EngineDead:
            return None
        return stats, speeds, age, self.ready()[0]


_USE = {
    "generate": ("generates text", "/v1/chat/completions or /v1/completions"),
    "embed": ("embeds texts", "/v1/embeddings"),
    "rerank": ("scores texts", "/v1/rerank or /v1/score"),
}
"""What a model does that is served for a task, and where."""


def check_task(engine: AsyncEngine, task: Task) -> None:
    """Raise WrongTask for a request that the model cannot serve."""
    if engine.task != task:
        does, where = _USE[engine.task]
        raise WrongTask(
            f"the model {engine.served_name!r} {does}: use {where}. This request needs another model, or one "
            f"served with --task {task}"
        )


def _unavailable(message: str, code: str, *, retry_after: int) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, headers={"Retry-After": str(retry_after)})
