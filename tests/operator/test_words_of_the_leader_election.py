"""What the election logs; that one of two replicas leads is proved on a cluster."""

from __future__ import annotations

import asyncio
import logging

from kubernetes.aio.client import Configuration

from leadline.operator.kube.api import KubeApi
from leadline.operator.kube.leader import LeaderElection


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put_nowait(record.getMessage())


async def test_an_api_server_that_takes_requests_and_is_silent_is_a_timeout_in_the_log() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    api = KubeApi(Configuration(host=f"http://127.0.0.1:{port}"))
    lines, log = Lines(), logging.getLogger("leadline.operator.kube.leader")
    log.addHandler(lines)
    election = asyncio.create_task(LeaderElection(api, "system", "lease", "me", 0.3).run())
    try:
        async with asyncio.timeout(20):
            assert await lines.queue.get() == "lease system/lease: TimeoutError"
    finally:
        log.removeHandler(lines)
        election.cancel()
        await asyncio.gather(election, return_exceptions=True)
        await api.close()
        silent.close()
