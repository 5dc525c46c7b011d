"""Whether a stream of a pod could continue on another pod.

Streams of Leadline's engines can, and pods that report over Redis are such. A pod
without reports (a static list, no Redis) is asked for /version before its first stream, and again after it
was lost, when an engine of another kind may have taken its place. Streams to a pod that does not say so are
left as they are, since another engine might refuse the fields that a movable stream needs.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from leadline.gateway.pods import Pod
from leadline.gateway.upstream.connection import Connection, Pool, UpstreamError

__all__ = ["Capabilities"]

logger = logging.getLogger("leadline.gateway")

_PATIENCE = 1.0
"""Seconds that a stream waits for the answer."""
_ASK_AGAIN = 5.0
"""Seconds before a pod that gave none is asked again."""


class _Version(msgspec.Struct):
    resumes_streams: bool = False


_decoder = msgspec.json.Decoder(_Version)


class Capabilities:
    """One an event loop. `pool`: address → its connections."""

    def __init__(self, pool: Callable[[str], Pool]) -> None:
        self._pool = pool
        self._asking: dict[str, asyncio.Future[bool | None]] = {}
        self._silent: dict[str, float] = {}
        """Addresses that gave no answer → when to ask again."""

    async def resumes_streams(self, pod: Pod) -> bool:
        """Whether the engine there reports token ids and continues behind `resume_token_ids`."""
        if pod.report is not None:
            return True
        if pod.resumes is None and time.monotonic() >= self._silent.get(pod.address, 0.0):
            pod.resumes = await self._asked(pod)
        return bool(pod.resumes)

    def forget(self, addresses: set[str]) -> None:
        """These pods are gone."""
        for address in self._silent.keys() & addresses:
            del self._silent[address]

    async def _asked(self, pod: Pod) -> bool | None:
        asking = self._asking.get(pod.address)
        if asking is None:
            asking = self._asking[pod.address] = asyncio.ensure_future(self._ask(pod))
            asking.add_done_callback(lambda _: self._asking.pop(pod.address, None))
        return await asyncio.shield(asking)

    async def _ask(self, pod: Pod) -> bool | None:
        """None if there is no answer."""
        connection: Connection | None = None
        until = time.monotonic() + _PATIENCE
        try:
            async with asyncio.timeout(_PATIENCE):
                connection = await self._pool(pod.address).take(fresh=True)
                connection.send(b"GET /version HTTP/1.1\r\nhost: %s\r\n\r\n" % pod.address.encode(), b"")
                status = await connection.answered(until)
                pieces = []
                while piece := await connection.read(until):
                    pieces.append(piece)
        except (UpstreamError, TimeoutError):
            self._silent[pod.address] = time.monotonic() + _ASK_AGAIN
            return None
        finally:
            if connection is not None:
                connection.abort()
        try:
            resumes = status == 200 and _decoder.decode(b"".join(pieces)).resumes_streams
        except msgspec.DecodeError:
            resumes = False
        if not resumes:
            logger.info("pod %s is no engine of ours: its streams cannot move to another pod", pod.id)
        return resumes
