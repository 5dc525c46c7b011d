"""One request on one pod: its lease, its say in the pod's circuit, its connection, what came of the answer.

Room: gateway/proxy. An attempt opens a lease and takes the breaker's permission; `close` gives back both, and
the connection, exactly once (P16).
"""

import logging
import time
from collections.abc import Callable

from leadline.gateway.pods import Pod
from leadline.gateway.proxy.breaker import breaker_of
from leadline.gateway.proxy.settings import ProxySettings
from leadline.gateway.proxy.upstream import Connection

__all__ = ["Attempt"]

logger = logging.getLogger("leadline.gateway")


class Attempt:
    """One request on one pod."""

    __slots__ = (
        "_breaker",
        "_closed",
        "_verdict",
        "body",
        "connection",
        "elsewhere",
        "headers",
        "lease",
        "movable",
        "pod",
        "status",
        "stream",
    )

    def __init__(self, pod: Pod, settings: ProxySettings, prefill: int, blocks: int) -> None:
        self.pod = pod
        self.connection: Connection | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        """What has come of the answer's body and was not passed on."""
        self.movable = False
        """The pod was asked for what it takes to go on with its stream elsewhere."""
        self.stream = False
        """The answer is a stream of events; else `body` is all of it, unless the connection has more."""
        self.elsewhere: Callable[[], bool] | None = None
        """Whether another pod could be asked instead; None: no."""
        self._breaker = breaker_of(pod, settings)
        self._verdict = False
        self._closed = False
        self._breaker.begin()
        self.lease = pod.lease(prefill_tokens=prefill, blocks=blocks, now=time.monotonic())

    def succeeded(self) -> None:
        self._verdict = True
        self._breaker.succeeded()

    def failed(self) -> None:
        self.pod.resumes = None  # another engine may come up in its place
        if not self._verdict:
            self._verdict = True
            if self._breaker.failed(time.monotonic()):
                logger.warning("circuit of pod %s opened", self.pod.id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.lease.close()
        if not self._verdict:
            self._breaker.abandoned()
        if self.connection is not None:
            self.connection.release()
            self.connection = None
