"""An unexpected error in periodic work of the leader, which must not end its other work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leadline.operator import periodic
from leadline.operator.autoscaling.service_scaler import ServiceScaler
from leadline.operator.probes import pod_events, start_progress


@pytest.mark.parametrize("kind", [start_progress.StartProgress, pod_events.PodEvents, ServiceScaler])
async def test_a_task_of_the_leader_goes_on_after_an_unexpected_error(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, again = 0, asyncio.Event()

    async def look(self: Any) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("odd")
        again.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(kind, "look", look)
    monkeypatch.setattr(periodic, "_FAULT_SECONDS", 0.0)
    monkeypatch.setattr(start_progress, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(pod_events, "LOOK_SECONDS", 0.0)
    task = asyncio.create_task(object.__new__(kind).run())
    try:
        async with asyncio.timeout(5):
            await again.wait()
    finally:
        task.cancel()
    assert "RuntimeError: odd" in caplog.text
