"""A real `leadline serve` tells a real reader of the blocks that its requests leave in the cache."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod
from leadline.gateway.sync.heartbeats import find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.protocol.chain import chain, short
from live_valkey import KEYS, until

pytestmark = pytest.mark.timeout(280)


class Served:
    def __init__(self, url: str, folder: Path, pod: str, model: Path) -> None:
        self._out = folder / "out"
        self.log = folder / "log"
        with self._out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "leadline.cli.main", "serve", str(model), "--port=0"),
                    *("--block-size=16", "--max-model-len=512", f"--cpu-kv-bytes={64 << 20}"),
                    *(f"--service={KEYS.namespace}/{KEYS.service}", f"--pod-name={pod}", "--served-name=m"),
                ],
                stdout=out,
                stderr=log,
                env={**os.environ, "LEADLINE_REDIS_URL": url},
            )

    @property
    def url(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        match = re.search(r" at (http://\S+)", self._out.read_text())
        return match[1] if match else ""

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def served(valkey: EmbeddedValkey, tmp_path: Path) -> Iterator[list[Served]]:
    made: list[Served] = []
    yield made
    for server in made:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


async def post(url: str, path: str, **body: object) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_served_engine_and_a_gateway_agree_on_what_is_cached(
    valkey: EmbeddedValkey, served: list[Served], tmp_path: Path, small_model: Path
) -> None:
    def serve(number: int) -> Served:
        folder = tmp_path / str(number)
        folder.mkdir()
        served.append(Served(valkey.url, folder, "pod-a", small_model))
        return served[-1]

    prompt = "the quick brown fox jumps over the lazy dog " * 12
    first = serve(1)
    pods = {}
    index = ServiceIndex()
    sync = RedisSync(KEYS, valkey.url, index, find_in(pods))
    sync.start()
    try:
        await until(lambda: first.url, 150)
        pod = pods["a"] = Pod("a", first.url.removeprefix("http://"))
        await until(lambda: pod.report is not None)
        assert pod.report is not None
        ids = (await post(first.url, "/tokenize", prompt=prompt))["tokens"]
        assert isinstance(ids, list)
        await post(first.url, "/v1/completions", model="m", prompt=ids, max_tokens=4, temperature=0)
        hashes = [short(h) for h in chain(pod.report.namespace(), ids)]
        assert len(hashes) == len(ids) // 16 > 5
        # What the gateway computes from the prompt is what the engine says it holds.
        await until(lambda: index.match(hashes, time.monotonic()).get("a") == len(hashes))

        again = await post(first.url, "/v1/completions", model="m", prompt=ids, max_tokens=4, temperature=0)
        usage = again["usage"]
        assert isinstance(usage, dict)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 16 * (len(hashes) - 1)
        await until(lambda: pod.report is not None and pod.report.prefill_tokens_per_second > 0)
        await until(lambda: pod.report is not None and pod.report.free_blocks == pod.report.total_blocks > 0)

        # An engine serves on without Redis, and its changes are published afterwards.
        valkey.kill()
        await until(lambda: sync.counts.failures >= 1)
        other = [token + 1 for token in ids]
        await post(first.url, "/v1/completions", model="m", prompt=other, max_tokens=1)
        valkey.restart()
        others = [short(h) for h in chain(pod.report.namespace(), other)]
        await until(lambda: index.match(others, time.monotonic()).get("a") == len(others))
        assert index.match(hashes, time.monotonic()).get("a") == len(hashes)

        await post(first.url, "/admin/reset_prefix_cache")
        await until(lambda: index.match(hashes, time.monotonic()) == {})
        await post(first.url, "/v1/completions", model="m", prompt=ids, max_tokens=1)
        await until(lambda: index.match(hashes, time.monotonic()).get("a") == len(hashes))

        # P19: killed, and back under the same name.
        epoch = pod.epoch
        first.end(signal.SIGKILL)
        second = serve(2)
        await until(lambda: second.url, 150)
        pod.address = second.url.removeprefix("http://")
        await until(lambda: pod.epoch != epoch)
        assert index.match(hashes, time.monotonic()) == {}
        assert await asyncio.to_thread(second.end, signal.SIGTERM) == 0
        password = valkey.url.split("@")[0].removeprefix("unix://:")
        assert "serving on and trying again" in first.log.read_text()
        assert all(password not in server.log.read_text() for server in served)
    finally:
        await sync.stop()
