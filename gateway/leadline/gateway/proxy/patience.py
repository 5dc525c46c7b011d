"""Waiting for pods: long for one that computes, not at all for one that hangs.

Room: gateway/proxy. The first byte of a long prompt may take minutes, so a timeout cannot tell a pod that
works from one that was stopped, swapped out or is stuck. /health can: a pod that is silent for `probe_after`
is asked for it, and one that does not answer within `probe_timeout` hangs.

    silent ──probe_after──▶ /health? ──answers──▶ wait on
                               └──nothing within probe_timeout──▶ PodHangs; its circuit is held open
                                      /health again every `breaker_seconds` until it answers ──▶ half-open

All who wait for one pod share its probe, and one probe that fails is enough: to find out by further requests
would cost each of them as long.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from leadline.gateway.pods import Pod
from leadline.gateway.proxy.breaker import breaker_of
from leadline.gateway.proxy.pool import Pool
from leadline.gateway.proxy.settings import ProxySettings
from leadline.gateway.proxy.upstream import Connection, PodHangs, UpstreamError, UpstreamTimeout

__all__ = ["Patience"]

logger = logging.getLogger("leadline.gateway")

T = TypeVar("T")


class Patience:
    """One an event loop. `pool`: address → its connections."""

    def __init__(self, settings: ProxySettings, pool: Callable[[str], Pool]) -> None:
        self._settings = settings
        self._pool = pool
        self._probes: dict[str, asyncio.Future[bool]] = {}
        self._hanging: dict[str, asyncio.Future[None]] = {}
        """Addresses of pods that hang → what waits for them to answer."""

    async def wait(self, wait: Callable[[float], Awaitable[T]], pod: Pod, until: float) -> T:
        """`wait(until)`, but leave a pod that answers nothing any more. Raises what `wait` raises,
        UpstreamTimeout at `until`, and PodHangs."""
        while True:
            soon = time.monotonic() + self._settings.probe_after
            try:
                return await wait(soon if soon < until else until)
            except UpstreamTimeout:
                if time.monotonic() >= until - 0.001:
                    raise
            if not await self._alive(pod.address):
                self._hold(pod)
                raise PodHangs(f"pod {pod.id} answers nothing, not even /health")

    def forget(self, addresses: set[str]) -> None:
        """These pods are gone."""
        for address in self._hanging.keys() & addresses:
            self._hanging.pop(address).cancel()

    def close(self) -> None:
        for probe in list(self._probes.values()):
            probe.cancel()
        self.forget(set(self._hanging))

    # -- inside ----------------------------------------------------------------------------------------------

    async def _alive(self, address: str) -> bool:
        probe = self._probes.get(address)
        if probe is None:
            probe = self._probes[address] = asyncio.ensure_future(self._probe(address))
            probe.add_done_callback(lambda _: self._probes.pop(address, None))
        return await asyncio.shield(probe)

    async def _probe(self, address: str) -> bool:
        """Whether the pod answers HTTP at all; with what does not matter."""
        connection: Connection | None = None
        seconds = self._settings.probe_timeout
        try:
            async with asyncio.timeout(seconds):
                connection = await self._pool(address).take(fresh=True)
                connection.send(b"GET /health HTTP/1.1\r\nhost: %s\r\n\r\n" % address.encode(), b"")
                await connection.answered(time.monotonic() + seconds)
                return True
        except (UpstreamError, TimeoutError):
            return False
        finally:
            if connection is not None:
                connection.abort()

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
