"""What only Events show: a volume that does not mount, a claim without a provisioner."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from operator_builders import condition, deployment, plan_of, pod, service, unschedulable, waiting

from leadline.operator.kube.api import KubeApi
from leadline.operator.kube.kinds import BY_KIND, POD, SERVICE
from leadline.operator.kube.store import Store
from leadline.operator.names import SERVICE_LABEL
from leadline.operator.probes.pod_events import PodEvents

KEY = ("team", "qwen")
MISSING = 'MountVolume.SetUp failed for volume "s" : secret "missing" not found'


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def stored(made: dict[str, Any], seconds: float) -> dict[str, Any]:
    made["metadata"] |= {"labels": {SERVICE_LABEL: "qwen"}, "resourceVersion": "5"}
    for one in made["status"]["conditions"]:
        one["lastTransitionTime"] = ago(seconds)
    return made


def mounting(seconds: float = 60, name: str = "p1") -> dict[str, Any]:
    """A pod that has had a node for so long, and not its volumes."""
    made = pod(name, phase="Pending", containerStatuses=[waiting("ContainerCreating")])
    made["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "PodReadyToStartContainers", "status": "False"},
    ]
    return stored(made, seconds)


def event(message: str, seconds: float = 0, reason: str = "FailedMount") -> dict[str, Any]:
    return {"type": "Warning", "reason": reason, "message": message, "lastTimestamp": ago(seconds)}


class Events:
    """An API server that has Events."""

    def __init__(self) -> None:
        self.of: dict[str, list[dict[str, Any]]] = {}
        """uid → Events about it."""
        self.status, self.asked = 200, 0

    async def list(self, request: web.Request) -> web.Response:
        self.asked += 1
        fields = dict(one.split("=") for one in request.query["fieldSelector"].split(","))
        assert fields["type"] == "Warning"
        found = self.of.get(fields["involvedObject.uid"], [])
        return web.json_response({"items": found, "metadata": {}}, status=self.status)


@contextlib.asynccontextmanager
async def watching(*pods: dict[str, Any]) -> AsyncIterator[tuple[Events, Store, PodEvents, list[Any]]]:
    events, store, queued, app = Events(), Store(), [], web.Application()
    app.router.add_get("/api/v1/namespaces/team/events", events.list)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api = KubeApi(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    store.put(SERVICE, service())
    for one in pods:
        store.put(POD, one)
    try:
        yield events, store, PodEvents(api, store, queued.append), queued
    finally:
        await api.close()
        await runner.cleanup()


async def test_a_volume_that_does_not_mount_is_news_once_and_until_the_pod_goes_on() -> None:
    async with watching(mounting()) as (events, store, watcher, queued):
        await watcher.look()
        assert (watcher.of(KEY), queued) == ({}, [])
        events.of["uid-p1"] = [event("something older", 90), event(MISSING)]
        await watcher.look()
        await watcher.look()
        assert watcher.of(KEY) == {"uid-p1": f"FailedMount: {MISSING}"}
        assert queued == [KEY]
        goes_on = mounting()
        goes_on["metadata"]["resourceVersion"] = "6"
        goes_on["status"]["conditions"][1]["status"] = "True"
        store.put(POD, goes_on)
        await watcher.look()
        assert watcher.of(KEY) == {}


async def test_pods_that_have_just_come_or_are_well_are_not_asked_about() -> None:
    async with watching(mounting(2), stored(pod("p2", ready=True), 60)) as (events, _, watcher, _queued):
        await watcher.look()
        assert events.asked == 0


async def test_a_claim_that_nobody_provides_is_asked_about_in_the_pods_place() -> None:
    waits = stored(unschedulable("pod has unbound immediate PersistentVolumeClaims"), 60)
    async with watching(waits) as (events, store, watcher, _):
        claim = {
            "metadata": {
                "name": "qwen-engine",
                "namespace": "team",
                "uid": "uid-c",
                "labels": {SERVICE_LABEL: "qwen"},
                "resourceVersion": "7",
            },
            "status": {"phase": "Pending"},
        }
        store.put(BY_KIND["PersistentVolumeClaim"], claim)
        events.of["uid-c"] = [event('storageclass "nosuch" not found', reason="ProvisioningFailed")]
        await watcher.look()
        assert watcher.of(KEY) == {"uid-p1": 'ProvisioningFailed: storageclass "nosuch" not found'}


@pytest.mark.parametrize("status", [403, 500])
async def test_without_the_right_to_see_events_all_goes_on(status: int) -> None:
    async with watching(mounting()) as (events, _, watcher, queued):
        events.status = status
        await watcher.look()
        assert events.asked == 1
        assert (watcher.of(KEY), queued) == ({}, [])


def test_the_status_says_what_is_in_the_way_of_a_volume_and_that_it_may_pass() -> None:
    said = plan_of(children=deployment(), pods=[mounting()], pod_events={"uid-p1": f"FailedMount: {MISSING}"})
    assert condition(said)["reason"] == "PodSetupFailed"
    assert condition(said)["message"] == f"p1: FailedMount: {MISSING}; it is tried again"
    assert condition(said, "Progressing")["status"] == "True"


def test_the_status_says_why_nobody_provides_a_claim() -> None:
    failed = {"uid-p1": 'ProvisioningFailed: storageclass "nosuch" not found'}
    waits = unschedulable("pod has unbound immediate PersistentVolumeClaims")
    said = condition(plan_of(children=deployment(), pods=[waits], pod_events=failed))
    assert said["reason"] == "Unschedulable"
    assert said["message"].endswith(
        'PersistentVolumeClaims; ProvisioningFailed: storageclass "nosuch" not found'
    )
    # While a volume is made for the node that was found, the pod has no condition at all.
    waits["status"]["conditions"] = []
    said = condition(plan_of(children=deployment(), pods=[waits], pod_events=failed))
    assert said["message"] == 'p1: ProvisioningFailed: storageclass "nosuch" not found'
