"""What admission keeps: a service's door, and the ticket of one request at it.

Room: gateway/admission. Data only; admission.py decides.
"""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from leadline.gateway.admission.drain_rate import DrainRate
from leadline.gateway.admission.fair_queue import FairQueue
from leadline.gateway.config import AdmissionConfig
from leadline.gateway.services import Service

if TYPE_CHECKING:
    from leadline.gateway.admission.admission import Admission

__all__ = ["AdmissionStats", "Client", "Door", "Ticket"]


class Client(Protocol):
    """What admission wants to know of who asks; `keys.Principal` is one."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority_class(self) -> str: ...


@dataclass(slots=True)
class AdmissionStats:
    """What happened at one service's door since the start."""

    admitted: int = 0
    """Let in, those that had waited included."""
    queued: int = 0
    """Had to wait."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals by code: queue_full, queue_timeout, no_pods, deadline_exceeded."""
    cancelled: int = 0
    """Clients that left while they waited."""
    waited_seconds: float = 0.0
    """Sum over requests that were let in."""


class Ticket:
    """One request at the door. An async context manager; made by `Admission.enter`."""

    __slots__ = (
        "_admission",
        "_class",
        "_cost",
        "_deadline",
        "_door",
        "_held_from",
        "_patience",
        "_pending",
        "_tenant",
        "_timer",
        "_turn",
        "waited_seconds",
    )

    def __init__(
        self,
        admission: "Admission",
        door: "Door",
        client: Client,
        deadline: float | None,
        cost: float,
        patience: float,
    ) -> None:
        self._admission = admission
        self._door = door
        self._tenant = client.tenant
        self._class = client.priority_class
        self._deadline = deadline
        self._cost = max(1.0, cost)
        self._patience = patience
        self._pending = False
        self._turn: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held_from = 0.0
        self.waited_seconds = 0.0
        """Seconds in the queue."""

    def routed(self) -> None:
        """A lease of this request is open: the pod counts it now. Any number of calls."""
        if self._pending:
            self._pending = False
            self._door.pending -= 1

    def let_in(self) -> bool:
        """Come in at once, if nobody waits and some pod has room; else wait for your `turn`. Raises as
        entering the context does. Whoever was let in must `leave`, whatever happens."""
        return self._admission._ask(self)

    async def turn(self) -> None:
        """Wait in the queue, after `let_in` has said no. Raises as entering the context does; then there is
        nothing to leave."""
        await self._admission._wait(self)

    def leave(self) -> None:
        """Give the place to the next one."""
        self.routed()
        if self._door.queue:
            self._admission.changed(self._door.service)

    async def __aenter__(self) -> "Ticket":
        if not self.let_in():
            await self.turn()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Door:
    """The state of one service."""

    __slots__ = ("look_soon", "pending", "queue", "rate", "service", "stats", "tick")

    def __init__(self, service: Service, config: AdmissionConfig) -> None:
        self.service = service
        self.queue: FairQueue[Ticket] = FairQueue(config.class_weights, config.tenant_weights)
        self.pending = 0
        """Requests let in whose lease is not open yet."""
        self.rate = DrainRate()
        self.stats = AdmissionStats()
        self.look_soon = False
        self.tick: asyncio.TimerHandle | None = None
