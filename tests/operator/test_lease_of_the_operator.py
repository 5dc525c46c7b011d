"""The Lease itself: whose it is, and what becomes of one that is deleted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from leadline.operator.kube import leader
from leadline.operator.kube.api import KubeApi
from leadline.operator.kube.leader import LeaderElection

OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "op", "uid": "uid-d"}}


class Server:
    """An API server with one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.refuses_owners = False

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.lease or {"message": "none"}, status=200 if self.lease else 404)
        wanted = await request.json()
        if self.refuses_owners and "ownerReferences" in wanted["metadata"]:
            return web.json_response({"reason": "Forbidden", "message": "no owners"}, status=403)
        self.version += 1
        wanted["metadata"]["resourceVersion"] = str(self.version)
        self.lease = wanted
        return web.json_response(wanted)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[Server, KubeApi]]:
    made, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = KubeApi(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        yield made, api
    finally:
        await api.close()
        await runner.cleanup()


def election(api: KubeApi, owner: dict[str, Any] | None = OWNER, duration: float = 600) -> LeaderElection:
    return LeaderElection(api, "system", "op", "me", duration, owner)


async def test_the_lease_goes_with_the_operators_deployment_one_of_an_older_operator_too() -> None:
    async with server() as (machine, api):
        await election(api, None)._round()
        assert machine.lease is not None
        assert "ownerReferences" not in machine.lease["metadata"]
        newer = election(api)
        await newer._round()
        assert newer.leading.is_set()
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "op", "uid": "uid-d"}
        assert machine.lease["metadata"]["ownerReferences"] == [owner]
        await election(api, None)._round()
        assert machine.lease["metadata"]["ownerReferences"] == [owner], "a renewal keeps it"


async def test_a_cluster_that_allows_no_owner_gets_a_lease_without() -> None:
    async with server() as (machine, api):
        machine.refuses_owners = True
        one = election(api)
        await one._round()
        assert one.leading.is_set()
        assert machine.lease is not None
        assert "ownerReferences" not in machine.lease["metadata"]


async def test_a_lease_that_is_deleted_is_not_made_again_at_once() -> None:
    """As at an uninstallation, whose last step is the signal to the process."""
    async with server() as (machine, api):
        one = election(api)
        await one._round()
        await one._round()
        machine.lease = None
        await one._round()
        assert machine.lease is None
        assert not one.leading.is_set()
        await election(api)._round()
        assert machine.lease is not None, "a process that has never seen one makes it"


async def test_a_lease_that_stays_away_is_made_again() -> None:
    async with server() as (machine, api):
        one = election(api, duration=2)
        await one._round()
        await one._round()
        machine.lease, one._duration = None, 0.0
        assert await one._acquire_or_renew()
        assert machine.lease is not None


async def test_a_holder_that_gets_no_answers_stops_before_another_may_take_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request of the holder waits for a third of the duration, as on a node without its network."""
    now = 1000.0

    class Silent:
        async def get(self, *_: object) -> dict[str, Any]:
            nonlocal now
            now += 5
            raise TimeoutError

    async with server() as (_, api):
        monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: now))
        one = election(api, duration=15)
        await one._round()
        assert one.leading.is_set()
        one._api = Silent()  # type: ignore[assignment]
        while one.leading.is_set():
            now += 5  # the pause between rounds
            await one._round()
        assert now - 1000 <= 10


async def test_others_wait_no_shorter_than_the_holder_counts_on() -> None:
    async with server() as (machine, api):
        await election(api, duration=1.9)._round()
        assert machine.lease is not None
        assert machine.lease["spec"]["leaseDurationSeconds"] == 2
