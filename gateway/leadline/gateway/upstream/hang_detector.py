"""Waits for pods: long for a pod that computes, not at all for one that hangs.

The first byte of a long prompt may take minutes, so a timeout cannot tell a pod that
computes from one that was stopped, swapped out or is stuck. /health can: a pod that is silent for
`probe_after` is asked for it. An engine answers 503 there when its core is frozen.

    silent ──probe_after──▶ /health? ──answers──▶ wait on
                               ├── 503: its core is frozen or gone ──────────────────────────▶ PodHangs
                               ├── silent for `leave_after`, nothing sent, other pod free ───▶ PodHangs
                               ├── silent for `hangs_after`, other pod free for a stream ────▶ PodHangs
                               └── silent for `probe_timeout` ───────────────────────────────▶ PodHangs

A request that can go to another pod leaves soon: it loses little if the first pod was only slow. If there is
none, or the others are full, it waits: a late answer of an overloaded pod is better than no answer. When
/health was silent for `hangs_after` and a request has left, or for `probe_timeout`, the pod's circuit is held
open; /health is asked again every `breaker_seconds` until it answers, then the circuit is half-open. All
requests on one pod share its probe, and one probe that fails is enough: to find out by further requests would
cost each of them as long.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from leadline.gateway.pods import Pod
from leadline.gateway.upstream.breaker import breaker_of
from leadline.gateway.upstream.connection import Connection, PodHangs, Pool, UpstreamError, UpstreamTimeout
from leadline.gateway.upstream.settings import ProxySettings

__all__ = ["HangDetector"]

logger = logging.getLogger("leadline.gateway")

T = TypeVar("T")

_NOT_SERVING = frozenset((502, 503, 504))
"""Answers to /health of an engine whose core is frozen or gone, and of a sidecar before one."""
_SLICES = 4
"""A wait for a probe is cut into so many. A gateway that was itself held up during one of them has read what
came meanwhile before the next one is over."""


class HangDetector:
    """One an event loop. `pool`: address → its connections."""

    def __init__(self, settings: ProxySettings, pool: Callable[[str], Pool]) -> None:
        self._settings = settings
        self._pool = pool
        self._probes: dict[str, asyncio.Future[bool]] = {}
        self._hanging: dict[str, asyncio.Future[None]] = {}
        """Addresses of pods that hang → what waits for them to answer."""

    async def wait(
        self,
        wait: Callable[[float], Awaitable[T]],
        pod: Pod,
        until: float,
        *,
        begun: bool = False,
        elsewhere: Callable[[], bool] | None = None,
    ) -> T:
        """`wait(until)`, but leave a pod that hangs. `elsewhere`: whether another pod can take over.
        `begun`: a part of the answer has gone to the client. Raises what `wait` raises, UpstreamTimeout at
        `until`, and PodHangs."""
        settings = self._settings
        while True:
            soon = time.monotonic() + settings.probe_after
            try:
                return await wait(soon if soon < until else until)
            except UpstreamTimeout:
                if time.monotonic() >= until - 0.001:
                    raise
            probe = self._probe_of(pod.address)
            leave = settings.hangs_after if begun else settings.leave_after
            if await self._ends_within(probe, leave):
                if probe.result():
                    continue
                self._hold(pod)
            elif elsewhere is None or not elsewhere():
                if await asyncio.shield(probe):
                    continue
                self._hold(pod)
            else:
                later = 0.0 if begun else settings.hangs_after - settings.leave_after
                asyncio.get_running_loop().call_later(later, self._hold_if_silent, pod, probe)
            try:  # what has come while the probe was waited for
                return await wait(time.monotonic())
            except UpstreamTimeout:
                raise PodHangs(f"pod {pod.id} answers nothing, and its /health does not either") from None

    def forget(self, addresses: set[str]) -> None:
        """These pods are gone."""
        for address in self._hanging.keys() & addresses:
            self._hanging.pop(address).cancel()

    def close(self) -> None:
        for probe in list(self._probes.values()):
            probe.cancel()
        self.forget(set(self._hanging))

    # -- inside ----------------------------------------------------------------------------------------------

    def _probe_of(self, address: str) -> asyncio.Future[bool]:
        probe = self._probes.get(address)
        if probe is None:
            probe = self._probes[address] = asyncio.ensure_future(self._probe(address))
            probe.add_done_callback(lambda _: self._probes.pop(address, None))
        return probe

    async def _ends_within(self, probe: asyncio.Future[bool], seconds: float) -> bool:
        for _ in range(_SLICES):
            await asyncio.wait((probe,), timeout=seconds / _SLICES)
            if probe.done():
                return True
        return False

    async def _probe(self, address: str) -> bool:
        """Whether the pod answers, and does not say that it cannot serve."""
        connection: Connection | None = None
        seconds = self._settings.probe_timeout
        try:
            async with asyncio.timeout(seconds):
                connection = await self._pool(address).take(fresh=True)
                connection.send(b"GET /health HTTP/1.1\r\nhost: %s\r\n\r\n" % address.encode(), b"")
                return await connection.answered(time.monotonic() + seconds) not in _NOT_SERVING
        except (UpstreamError, TimeoutError):
            return False
        finally:
            if connection is not None:
                connection.abort()

    def _hold_if_silent(self, pod: Pod, probe: asyncio.Future[bool]) -> None:
        if not probe.done() or not (probe.cancelled() or probe.result()):
            self._hold(pod)

    def _hold(self, pod: Pod) -> None:
        breaker_of(pod, self._settings).hold()
        if pod.address not in self._hanging:
            logger.warning("pod %s hangs: its circuit is open until it answers /health", pod.id)
            self._hanging[pod.address] = asyncio.ensure_future(self._release(pod))

    async def _release(self, pod: Pod) -> None:
        try:
            while True:
                await asyncio.sleep(self._settings.breaker_seconds)
                if await self._probe(pod.address):
                    break
            breaker_of(pod, self._settings).try_again(time.monotonic())
            logger.info("pod %s answers again", pod.id)
        finally:
            if self._hanging.get(pod.address) is asyncio.current_task():
                del self._hanging[pod.address]
