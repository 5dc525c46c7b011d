"""The progress of a start in /health and /ready: the contract that the operator reads."""

from __future__ import annotations

import httpx

from leadline.engine import wire
from leadline.engine.server.app import create_app
from leadline.engine.server.process.run import ProgressLog
from leadline.engine.server.settings import ServerSettings
from leadline.engine.server.state import Phase, ServerState


def starting_server() -> tuple[httpx.AsyncClient, ServerState]:
    app = create_app(None, ServerSettings())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
    return client, app.state.server


async def test_health_and_ready_tell_phase_and_share_while_starting() -> None:
    client, state = starting_server()
    ProgressLog(state)(wire.Progress("loading weights", 0.4212345, "0.23 of 0.54 GB"))
    async with client:
        health, ready = await client.get("/health"), await client.get("/ready")
    progress = {"phase": "loading weights", "fraction": 0.4212, "detail": "0.23 of 0.54 GB"}
    assert (health.status_code, health.json()) == (200, {"status": "starting", "progress": progress})
    assert (ready.status_code, ready.json()["progress"]) == (503, progress)
    assert "loading weights 42%: 0.23 of 0.54 GB" in ready.json()["error"]["message"]
    assert ready.headers["retry-after"]


async def test_a_phase_without_a_known_end_has_no_share() -> None:
    client, state = starting_server()
    ProgressLog(state)(wire.Progress("warming", None, "16 KV blocks"))
    async with client:
        ready = await client.get("/ready")
    assert ready.json()["progress"] == {"phase": "warming", "fraction": None, "detail": "16 KV blocks"}


async def test_nothing_is_told_before_the_first_report_nor_after_the_start() -> None:
    client, state = starting_server()
    async with client:
        assert (await client.get("/health")).json() == {"status": "starting"}
        ProgressLog(state)(wire.Progress("warming"))
        state.phase = Phase.DRAINING
        assert (await client.get("/health")).json() == {"status": "draining"}
        assert "progress" not in (await client.get("/ready")).json()
