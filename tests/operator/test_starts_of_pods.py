"""How far starting pods are: asked beside the workers, told in steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from operator_builders import pod, running, service

from leadline.operator.kube.kinds import POD, SERVICE
from leadline.operator.kube.store import Store
from leadline.operator.names import SERVICE_LABEL
from leadline.operator.planning.observed import StartReport
from leadline.operator.probes import pod_probe
from leadline.operator.probes.pod_probe import PodProbe, parse_start
from leadline.operator.probes.start_progress import StartProgress, is_step

KEY = ("team", "qwen")


def loading(share: float | None, detail: str = "") -> StartReport:
    return StartReport("not ready", "loading weights", share, detail)


@pytest.mark.parametrize(
    ("before", "now", "news"),
    [
        (None, loading(0.0), True),
        (loading(0.0), loading(0.049), False),
        (loading(0.0), loading(0.05), True),
        (loading(0.05), loading(0.0999), False),
        (loading(0.05), loading(0.15), True),
        (loading(1.0), StartReport("not ready", "warming"), True),
        (loading(None, "0.4 GB"), loading(None, "0.5 GB"), False),
        (
            StartReport("the loop has not moved for 31 s"),
            StartReport("the loop has not moved for 33 s"),
            False,
        ),
        (StartReport("draining"), StartReport("the engine is gone"), True),
    ],
)
def test_news_are_phases_and_steps_of_five_percent(
    before: StartReport | None, now: StartReport, news: bool
) -> None:
    assert is_step(now, before) == news


def test_a_whole_load_is_no_more_than_twenty_one_pieces_of_news() -> None:
    told: list[StartReport] = []
    for percent in range(101):
        report = loading(percent / 100)
        if is_step(report, told[-1] if told else None):
            told.append(report)
    assert len(told) == 21


@pytest.mark.parametrize("body", [b"", b"ok", b"[]", b"{}", b'{"error": 3}', b'{"error": {"message": ""}}'])
def test_an_answer_that_says_nothing_is_none(body: bytes) -> None:
    assert parse_start(body) is None


def test_an_answer_made_to_break_the_reader_does_not() -> None:
    """A team may run any image. What is raised here would end the operator."""
    assert parse_start(b"[" * 4096) is None
    assert parse_start(b'{"progress": {"phase": "loading", "fraction": 1' + b"0" * 400 + b"}}") is None
    report = parse_start(b'{"progress": {"phase": "loading", "fraction": NaN}}')
    assert report == StartReport("", "loading", None)
    assert not is_step(report, report)


def test_the_engines_own_answer_is_understood() -> None:
    import msgspec

    from leadline.protocol.errors import ErrorObject
    from leadline.protocol.openai.service import NotReadyResponse, StartProgress

    told = StartProgress(phase="downloading", fraction=0.21, detail="3.2 of 15.3 GB")
    answer = NotReadyResponse(error=ErrorObject(message="not ready"), progress=told)
    report = StartReport("not ready", "downloading", 0.21, "3.2 of 15.3 GB")
    assert parse_start(msgspec.json.encode(answer)) == report


class Engine:
    """Answers /ready as an engine that starts does."""

    def __init__(self) -> None:
        self.share, self.asked = 0.0, 0
        self.silent = asyncio.Event()

    async def ready(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.silent.is_set():
            await asyncio.Event().wait()
        told = {"phase": "loading weights", "fraction": self.share, "detail": ""}
        return web.json_response({"error": {"message": "not ready"}, "progress": told}, status=503)


def starting_pod(name: str = "p1", **more: Any) -> dict[str, Any]:
    made = pod(name, podIP="127.0.0.1", **more)
    made["metadata"] |= {"labels": {SERVICE_LABEL: "qwen"}, "resourceVersion": "5"}
    return made


async def test_a_service_is_queued_when_one_of_its_pods_takes_a_step_and_not_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, store, queued = Engine(), Store(), []
    app = web.Application()
    app.router.add_get("/ready", engine.ready)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(pod_probe, "PORT", runner.addresses[0][1])
    monkeypatch.setattr(pod_probe, "_TIMEOUT", pod_probe.aiohttp.ClientTimeout(total=0.3))
    probe = PodProbe()
    watcher = StartProgress(store, probe, queued.append)
    try:
        store.put(SERVICE, service())
        store.put(POD, starting_pod())
        for share in (0.41, 0.42, 0.44, 0.46):
            engine.share = share
            await watcher.look()
        assert queued == [KEY, KEY]
        assert watcher.reports(store.pods(KEY))["uid-p1"].fraction == 0.46
        # One that hangs neither raises nor takes back what is known.
        engine.silent.set()
        await watcher.look()
        assert watcher.reports(store.pods(KEY))["uid-p1"].fraction == 0.46
        asked = engine.asked
        ready = starting_pod()
        ready["metadata"]["resourceVersion"] = "6"
        ready["status"]["conditions"][1]["status"] = "True"
        ready["status"]["containerStatuses"] = [running(ready=True)]
        store.put(POD, ready)
        await watcher.look()
        assert engine.asked == asked  # a pod that is ready is asked no more
        assert watcher.reports(store.pods(KEY)) == {}
    finally:
        await probe.close()
        await runner.cleanup()


async def test_pods_of_other_operators_are_not_asked() -> None:
    class Counting(PodProbe):
        asked = 0

        async def start_of(self, pod: dict[str, Any]) -> StartReport | None:
            self.asked += 1
            return None

    store, probe = Store(), Counting()
    store.put(SERVICE, service())
    store.put(POD, starting_pod())
    try:
        await StartProgress(store, probe, lambda key: None, lambda service: False).look()
        assert probe.asked == 0
        await StartProgress(store, probe, lambda key: None).look()
        assert probe.asked == 1
    finally:
        await probe.close()
