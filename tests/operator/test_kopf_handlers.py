"""The whole operator process on an API server with nothing in it: what it watches, its probes, its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web

from leadline.operator import handlers, main
from leadline.operator.controller import Controller, OperatorFailure
from leadline.operator.kube.kinds import CHILDREN, POD, SERVICE, Kind
from leadline.operator.names import MANAGED_SELECTOR
from leadline.operator.settings import OperatorSettings


class Server:
    def __init__(self) -> None:
        self.watches: dict[str, str] = {}
        """Path → label selector."""
        self.writes: list[str] = []
        self.status = 200
        self.silent = False
        self.seen = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
        if self.silent:
            self.seen.set()
            await asyncio.Event().wait()
        if (found := discovered(request.path)) is not None:
            return web.json_response(found)
        if self.status != 200:
            body = {"kind": "Status", "reason": "Forbidden", "message": "no rights"}
            return web.json_response(body, status=self.status)
        if "watch" not in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})
        self.watches[request.path] = request.query.get("labelSelector", "")
        self.seen.set()
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response


def discovered(path: str) -> dict[str, Any] | None:
    """What the API server tells kopf about its kinds."""
    needed = (
        Kind("Namespace", "v1", "namespaces"),
        Kind("CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions"),
    )
    kinds = (*CHILDREN, POD, SERVICE, *needed)
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        groups = {kind.group: kind.version for kind in kinds if kind.group}
        return {
            "groups": [
                {
                    "name": group,
                    "versions": [{"version": version, "groupVersion": f"{group}/{version}"}],
                    "preferredVersion": {"version": version},
                }
                for group, version in groups.items()
            ]
        }
    of = [kind for kind in kinds if path == f"/api{'s' if kind.group else ''}/{kind.api_version}"]
    verbs = ["list", "watch", "patch"]
    resources = [
        {"name": kind.plural, "kind": kind.kind, "singularName": "", "namespaced": True, "verbs": verbs}
        for kind in of
    ]
    return {"resources": resources} if of else None


@asynccontextmanager
async def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    # The library reads the variable when it is imported.
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "kubeconfig")
    )
    try:
        yield made
    finally:
        await runner.cleanup()


async def test_it_watches_every_kind_reports_its_state_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    controllers: list[Controller] = []
    monkeypatch.setattr(
        main, "Controller", lambda settings: controllers.append(Controller(settings)) or controllers[0]
    )
    async with server(tmp_path, monkeypatch) as api:
        settings = OperatorSettings(port=0, liveness_port=port, leader_elect=False)
        running = asyncio.create_task(main._run(settings))
        async with asyncio.timeout(20):
            while len(api.watches) < len(CHILDREN) + 2:
                api.seen.clear()
                await api.seen.wait()
            await controllers[0].synced.wait()
            url = f"http://127.0.0.1:{port}/health"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                state = await answer.json()
            controllers[0].stopping.set()
            assert await running is None
        assert state == {"synced": True, "leading": True, "queued": 0}
        found = {path.rpartition("/")[2]: selector for path, selector in api.watches.items()}
        assert found == {SERVICE.plural: ""} | {kind.plural: MANAGED_SELECTOR for kind in (*CHILDREN, POD)}
        assert api.writes == []


async def test_without_rights_it_ends_with_the_api_servers_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path, monkeypatch) as api:
        api.status = 403
        async with asyncio.timeout(20):
            failure = await main._run(OperatorSettings(port=0))
        assert isinstance(failure, OperatorFailure)
        assert str(failure) == "the API server refuses: Forbidden: no rights"


async def test_it_ends_soon_when_it_is_stopped_before_the_api_server_has_answered_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf alone waits five seconds for the requests of its start."""
    controllers: list[Controller] = []
    monkeypatch.setattr(
        main, "Controller", lambda settings: controllers.append(Controller(settings)) or controllers[0]
    )
    monkeypatch.setattr(main, "_KOPF_SECONDS", 0.1)
    async with server(tmp_path, monkeypatch) as api:
        api.silent = True
        running = asyncio.create_task(main._run(OperatorSettings(port=0)))
        async with asyncio.timeout(20):
            await api.seen.wait()
        controllers[0].stopping.set()
        async with asyncio.timeout(4):
            assert await running is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_in_a_pod_kopf_watches_at_the_address_of_all_other_requests(
    host: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: found)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    made = handlers.login()
    assert made is not None
    assert (made.server, made.token) == (server, "t")
