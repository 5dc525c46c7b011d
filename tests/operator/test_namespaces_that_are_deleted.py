"""A namespace that is being deleted: the first refusal tells, and nothing more is written there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from operator_builders import SETTINGS, service

from leadline.operator.autoscaling.ranking import Ranker
from leadline.operator.kube.api import ApiError, KubeApi, NamespaceTerminating
from leadline.operator.kube.kinds import EVENT, SERVICE
from leadline.operator.kube.store import Store
from leadline.operator.probes.pod_probe import PodProbe
from leadline.operator.reconcile import Reconciler


def refusal(reason: str) -> dict[str, Any]:
    """As the API server words it."""
    return {
        "kind": "Status",
        "reason": "Forbidden",
        "code": 403,
        "message": "unable to create new content in namespace team because it is being terminated",
        "details": {"causes": [{"reason": reason, "field": "metadata.namespace"}]},
    }


class Server:
    """An API server that has services, and refuses to make anything in their namespace."""

    def __init__(self) -> None:
        self.services: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.cause = "NamespaceTerminating"

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            found = self.services.get(request.path.rpartition("/")[2])
            return web.json_response(found or {"items": [], "metadata": {}})
        self.writes += 1
        return web.json_response(refusal(self.cause), status=403)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[Server, KubeApi, Reconciler, Store]]:
    made, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = KubeApi(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    store, probe = Store(), PodProbe()
    try:
        yield made, api, Reconciler(api, store, SETTINGS, lambda pods: {}, Ranker(api, probe)), store
    finally:
        await api.close()
        await probe.close()
        await runner.cleanup()


def named(name: str, uid: str = "") -> dict[str, Any]:
    made = service({"replicas": 1}, name=name)
    made["metadata"]["uid"] = uid or f"uid-{name}"
    return made


async def test_the_first_refusal_ends_all_writes_in_the_namespace() -> None:
    names = [f"s{number}" for number in range(30)]
    async with server() as (machine, _, reconciler, store):
        for name in names:
            machine.services[name] = named(name)
            store.put(SERVICE, machine.services[name])
        await reconciler.reconcile(("team", names[0]))
        first = machine.writes
        assert first
        for name in names:
            assert await reconciler.reconcile(("team", name)) == ("gone", None)
        assert machine.writes == first

        # Once it is gone and made again, a service of its name is another's.
        for name in names:
            store.remove(SERVICE, machine.services.pop(name))
            await reconciler.reconcile(("team", name))
        machine.services["s0"] = named("s0", "uid-new")
        store.put(SERVICE, machine.services["s0"])
        await reconciler.reconcile(("team", "s0"))
        assert machine.writes > first


@pytest.mark.parametrize("cause", ["NamespaceTerminating", "FieldValueInvalid"])
async def test_a_refusal_for_another_reason_is_no_end_of_the_namespace(cause: str) -> None:
    async with server() as (machine, api, _, _store):
        machine.cause = cause
        with pytest.raises(ApiError) as caught:
            await api.create({"metadata": {"namespace": "team"}}, EVENT)
        assert isinstance(caught.value, NamespaceTerminating) == (cause == "NamespaceTerminating")
        assert caught.value.is_permanent == (cause != "NamespaceTerminating")
