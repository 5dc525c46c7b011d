"""What the autoscaler decides on, and which pods go when a service shrinks: real HTTP on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from operator_builders import SETTINGS, deployment, plan_of, pod, service, wanted

from leadline.operator.autoscaling import gateways, service_scaler
from leadline.operator.autoscaling.demand import GatewayView
from leadline.operator.autoscaling.gateways import Gateways
from leadline.operator.autoscaling.ranking import DELETION_COST, PodUse, Ranker, deletion_costs, parse_use
from leadline.operator.autoscaling.service_scaler import ServiceScaler
from leadline.operator.kube.api import Conflict, KubeApi
from leadline.operator.kube.kinds import POD, SERVICE, Kind
from leadline.operator.kube.store import Store
from leadline.operator.names import SERVICE_LABEL
from leadline.operator.probes import pod_probe
from leadline.operator.probes.pod_probe import PodProbe
from leadline.protocol.isvc import ASLEEP_ANNOTATION

USES: dict[str, tuple[dict[str, PodUse | None], list[str]]] = {
    "the idle before the busy": ({"a": PodUse(3, 0.0), "b": PodUse(0, 0.0)}, ["b", "a"]),
    "of idle ones the cold before the warm": ({"a": PodUse(0, 0.9), "b": PodUse(0, 0.2)}, ["b", "a"]),
    "a request outweighs a warm cache": ({"a": PodUse(0, 1.0), "b": PodUse(1, 0.0)}, ["a", "b"]),
    "a silent one in the middle": (
        {"a": PodUse(9, 0.5), "b": None, "c": PodUse(0, 0.1), "d": PodUse(2, 0.0)},
        ["c", "b", "d", "a"],
    ),
}


@pytest.mark.parametrize("case", USES)
def test_the_least_useful_pod_costs_least(case: str) -> None:
    uses, order = USES[case]
    costs = deletion_costs(uses)
    assert sorted(costs, key=lambda name: (costs[name], name)) == order


@pytest.mark.parametrize(
    "uses", [{}, {"a": PodUse(1, 1)}, {"a": None, "b": None}, {"a": None, "b": PodUse(0, 0)}]
)
def test_where_nothing_can_be_compared_there_is_no_cost(uses: dict[str, PodUse | None]) -> None:
    assert deletion_costs(uses) == {}


ENGINE = """\
# HELP leadline_engine_kv_blocks KV blocks of the pool.
leadline_engine_kv_blocks 200.0
leadline_engine_kv_blocks_used 20.0
leadline_engine_kv_blocks_cached 80.0
leadline_engine_running_requests 2.0
leadline_engine_waiting_requests{priority_class="interactive"} 1.0
leadline_engine_waiting_requests{priority_class="batch"} 4.0
"""


def test_an_engines_metrics_tell_its_use() -> None:
    assert parse_use(ENGINE) == PodUse(7, 0.5)
    assert parse_use("leadline_engine_ready 0.0") is None
    with pytest.raises(ValueError, match="KV blocks"):
        parse_use(ENGINE + "leadline_engine_kv_blocks NaN\n")


class Machine:
    """An API server's pods, and the /metrics of the pods, on one port of this machine."""

    def __init__(self) -> None:
        self.metrics: dict[str, str] = {}
        """Address → text; an address that is missing answers 404."""
        self.pods: list[dict[str, Any]] = []
        self.hpas: list[dict[str, Any]] | None = []
        """None: they may not be listed."""
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.status = 200

    async def tell(self, request: web.Request) -> web.Response:
        text = self.metrics.get(str(request.transport and request.transport.get_extra_info("sockname")[0]))
        return web.Response(status=404) if text is None else web.Response(text=text)

    async def list(self, _: web.Request) -> web.Response:
        return web.json_response({"items": self.pods, "metadata": {}}, status=self.status)

    async def list_hpas(self, _: web.Request) -> web.Response:
        status = 403 if self.hpas is None else 200
        return web.json_response({"items": self.hpas or [], "metadata": {}}, status=status)

    async def patch(self, request: web.Request) -> web.Response:
        self.patches.append((request.match_info["name"], await request.json()))
        return web.json_response({}, status=self.status)


@contextlib.asynccontextmanager
async def machine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Machine, KubeApi, PodProbe]]:
    made, app = Machine(), web.Application()
    app.router.add_get("/metrics", made.tell)
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", made.list)
    app.router.add_get("/apis/autoscaling/v2/horizontalpodautoscalers", made.list_hpas)
    app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", made.patch)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    port = runner.addresses[0][1]
    for module, name in ((pod_probe, "PORT"), (gateways, "_PORT")):
        monkeypatch.setattr(module, name, port)
    # `metrics` has the port as its default.
    monkeypatch.setattr(PodProbe.metrics, "__defaults__", (port,))
    api, probe = KubeApi(Configuration(host=f"http://127.0.0.1:{port}")), PodProbe()
    try:
        yield made, api, probe
    finally:
        await api.close()
        await probe.close()
        await runner.cleanup()


def serving(name: str, address: str, **metadata: Any) -> dict[str, Any]:
    made = pod(name, ready=True, podIP=address)
    made["metadata"] |= metadata
    return {**made, "spec": {"containers": [{"name": "gateway"}]}}


def shrunk(replicas: int) -> dict[str, Any]:
    return wanted(plan_of({"replicas": replicas}), "Deployment")


async def test_pods_are_ranked_when_a_service_shrinks_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch) as (server, api, probe):
        pods = [serving("a", "127.0.0.1"), serving("b", "127.0.0.2"), pod("c", podIP="127.0.0.3")]
        server.metrics = {"127.0.0.1": ENGINE, "127.0.0.2": "leadline_engine_running_requests 0.0"}
        ranker = Ranker(api, probe)
        await ranker.before(shrunk(3), deployment(3), pods)
        await ranker.before(shrunk(4), deployment(3), pods)
        await ranker.before(shrunk(0), deployment(3), pods)
        await ranker.before(shrunk(2), deployment(3), pods)  # the one that is not ready goes anyway
        await ranker.before(shrunk(1), {}, pods)
        assert server.patches == []
        await ranker.before(shrunk(1), deployment(3), pods)
        costs = {name: body["metadata"]["annotations"][DELETION_COST] for name, body in server.patches}
        assert costs == {"a": "7050", "b": "0"}
        # Once they stand, nothing is written again.
        for one in pods[:2]:
            one["metadata"]["annotations"] = {DELETION_COST: costs[one["metadata"]["name"]]}
        server.patches.clear()
        await ranker.before(shrunk(1), deployment(3), pods)
        assert server.patches == []


async def test_a_cost_that_cannot_be_set_does_not_stop_the_scaling_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with machine(monkeypatch) as (server, api, probe):
        server.status = 403
        server.metrics = {"127.0.0.1": ENGINE, "127.0.0.2": ENGINE}
        pods = [serving("a", "127.0.0.1"), serving("b", "127.0.0.2")]
        await Ranker(api, probe).before(shrunk(1), deployment(2), pods)
        assert len(server.patches) == 2


GATEWAY = 'leadline_gateway_pods{service="team/qwen"} 2.0\n'
COUNT = GATEWAY + 'leadline_gateway_in_flight_requests{service="team/qwen"} 3.0\n'


async def test_every_replica_of_the_gateway_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    three, none = GatewayView({"team/qwen": 3.0}), GatewayView({"team/qwen": 0.0})
    async with machine(monkeypatch) as (server, api, probe):
        found = Gateways(api, SETTINGS, probe)
        assert await found.views() == []
        server.pods = [serving("a", "127.0.0.1"), serving("b", "127.0.0.2"), pod("starts", podIP="127.0.0.3")]
        server.metrics = {"127.0.0.1": COUNT, "127.0.0.2": GATEWAY, "127.0.0.3": COUNT}
        assert await found.views() == [three, none]
        # One that is silent is a gap; one that leaves counts while it speaks.
        del server.metrics["127.0.0.2"]
        assert await found.views() == [three, None]
        server.pods[1]["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
        assert await found.views() == [three]
        server.metrics["127.0.0.2"] = COUNT
        assert await found.views() == [three, three]


async def test_metrics_are_read_to_their_end_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine(monkeypatch) as (server, api, probe):
        server.pods = [serving("a", "127.0.0.1")]
        # More than a socket holds, and than one read of it gives.
        server.metrics = {"127.0.0.1": GATEWAY + "# of other services\n" * 100_000 + COUNT}
        assert await Gateways(api, SETTINGS, probe).views() == [GatewayView({"team/qwen": 3.0})]
        monkeypatch.setattr(gateways, "_MAX_METRICS", 1 << 20)
        assert await Gateways(api, SETTINGS, probe).views() == [None]


@pytest.mark.parametrize(("status", "views"), [(500, [None]), (429, [None]), (403, [])])
async def test_an_api_server_that_does_not_tell_means_hold_and_one_that_forbids_means_ask_the_pods(
    status: int, views: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine(monkeypatch) as (server, api, probe):
        server.status = status
        assert await Gateways(api, SETTINGS, probe).views() == views


def scaler(kind: str, name: str, group: str = "serving.leadline.io/v1alpha1") -> dict[str, Any]:
    target = {"apiVersion": group, "kind": kind, "name": name}
    return {"metadata": {"name": "h", "namespace": "team"}, "spec": {"scaleTargetRef": target}}


SCALERS: dict[str, tuple[list[dict[str, Any]] | None, bool, bool]] = {
    # what the API server lists, whether an HPA has scaled the service, whether we step aside
    "an HPA that has not acted yet": ([scaler("InferenceService", "qwen")], False, True),
    "an HPA that has acted": ([scaler("InferenceService", "qwen")], True, True),
    "an HPA of the Deployment": ([scaler("Deployment", "qwen-engine", "apps/v1")], False, True),
    "an HPA of another service": ([scaler("InferenceService", "other")], True, False),
    "an HPA of another kind": ([scaler("InferenceService", "qwen", "kserve.io/v1")], True, False),
    "it may not be listed, and one has acted": (None, True, True),
    "it may not be listed, and none has acted": (None, False, False),
}


@pytest.mark.parametrize("case", SCALERS)
async def test_autoscaling_steps_aside_for_as_long_as_there_is_an_hpa(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, acted, aside = SCALERS[case]
    async with machine(monkeypatch) as (server, api, probe):
        server.hpas = listed
        store, scales = Store(), ScaleServer(Configuration(host=api._client.configuration.host))
        store.put(SERVICE, autoscaled(managedFields=[HPA] if acted else []))
        scales.scaled = []
        server.pods, server.metrics = [serving("gw", "127.0.0.1")], {"127.0.0.1": BUSY}
        try:
            told: list[Any] = []
            scaler = ServiceScaler(scales, store, SETTINGS, probe, told.append)
            await scaler.look()
            assert scales.scaled == ([] if aside else [3])
            report = scaler.report(("team", "qwen"))
            assert report is not None
            assert report.active is not aside
            said = "a HorizontalPodAutoscaler targets" if aside else "2 to 3 replicas: 90 requests in flight"
            assert report.message.startswith(said)
            assert set(told) == {("team", "qwen")}
            before = len(told)
            await scaler.look()
            assert len(told) - before == (0 if aside else 1), "what has not changed is not told again"
        finally:
            await scales.close()


BUSY = COUNT.replace(" 3.0", " 90.0")


class ScaleServer(KubeApi):
    """Notes what is scaled; lists are the machine's."""

    scaled: list[int]

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int, version: str = "") -> None:
        self.scaled.append(replicas)


def autoscaled(**metadata: Any) -> dict[str, Any]:
    made = service({"replicas": 2, "autoscaling": {"min": 1, "max": 4, "targetConcurrency": 32}})
    made["metadata"] |= metadata
    return made


HPA = {
    "manager": "kube-controller-manager",
    "subresource": "scale",
    "fieldsV1": {"f:spec": {"f:replicas": {}}},
}
ROUNDS: dict[str, tuple[dict[str, Any], str | None, str | None, list[int]]] = {
    "the gateway's count decides": (autoscaled(), BUSY, "leadline_engine_running_requests 0", [3]),
    "the pods' where the gateway does not know the service": (
        autoscaled(),
        'leadline_gateway_pods{service="team/other"} 1.0',
        "leadline_engine_running_requests 200",
        [4],
    ),
    "a silent gateway holds, whatever the pods say": (
        autoscaled(),
        None,
        "leadline_engine_running_requests 200",
        [],
    ),
    "one that an HPA has scaled that is no more is ours again": (
        autoscaled(managedFields=[HPA]),
        BUSY,
        None,
        [3],
    ),
    "one that is being deleted is left alone": (autoscaled(deletionTimestamp="now"), BUSY, None, []),
    "another operator's is left alone": (
        autoscaled(labels={"serving.leadline.io/operator": "other"}),
        BUSY,
        None,
        [],
    ),
}


@pytest.mark.parametrize("case", ROUNDS)
async def test_one_round_of_the_autoscaler(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item, gateway, engine, scaled = ROUNDS[case]
    async with machine(monkeypatch) as (server, api, probe):
        store, scales = Store(), ScaleServer(Configuration(host=api._client.configuration.host))
        scales.scaled = []
        store.put(SERVICE, item)
        pods = [serving("e1", "127.0.0.2"), serving("e2", "127.0.0.3")]
        for one in pods:
            one["metadata"] |= {"labels": {SERVICE_LABEL: "qwen"}, "resourceVersion": "5"}
            store.put(POD, one)
        server.pods = [serving("gw", "127.0.0.1")]
        for address, text in (("127.0.0.1", gateway), ("127.0.0.2", engine)):
            if text is not None:
                server.metrics[address] = text + "\n"
        try:
            await ServiceScaler(scales, store, SETTINGS, probe).look()
            assert scales.scaled == scaled
        finally:
            await scales.close()


class SleepServer(ScaleServer):
    """Keeps what is written to the service, as the API server does; `requests` has it in order."""

    store: Store
    requests: list[str]
    stale = False
    """Whether the operator's store is behind."""

    def _change(self, change: Callable[[dict[str, Any]], object]) -> None:
        item = copy.deepcopy(self.store.service(("team", "qwen")))
        assert item is not None
        change(item)
        item["metadata"]["resourceVersion"] = str(int(item["metadata"]["resourceVersion"]) + 1)
        self.store.put(SERVICE, item)

    async def scale(self, kind: Kind, namespace: str, name: str, replicas: int, version: str = "") -> None:
        self.requests.append(f"scale {replicas}")
        self._change(lambda item: item["spec"].update(replicas=replicas))

    async def annotate(
        self, kind: Kind, metadata: dict[str, Any], annotations: Any, version: str = ""
    ) -> None:
        ((name, value),) = annotations.items()
        assert name == ASLEEP_ANNOTATION
        if version and self.stale:
            raise Conflict(409, "Conflict", "the object has been modified")
        self.requests.append("mark" if value else "unmark")
        self._change(lambda item: item["metadata"].update(annotations=annotations if value else {}))


@dataclass
class Sleeper:
    """A service with `autoscaling.min: 0`, one pod, one gateway, and a clock that the test moves."""

    server: Machine
    api: SleepServer
    scaler: ServiceScaler
    now: float = 1000.0

    def gateway(self, in_flight: int = 0, ended: int = 7) -> None:
        self.server.metrics["127.0.0.1"] = (
            f'{GATEWAY}leadline_gateway_in_flight_requests{{service="team/qwen"}} {in_flight}\n'
            f'leadline_gateway_requests_total{{code="200",service="team/qwen"}} {ended}\n'
            'leadline_gateway_requests_total{code="200",service="team/other"} 999\n'
        )

    async def look(self, seconds: float) -> list[str]:
        """What is written in a look at all services, so much later."""
        self.now += seconds
        self.api.requests = []
        await self.scaler.look()
        return self.api.requests

    async def wake(self) -> list[str]:
        self.api.requests = []
        await self.scaler.wake()
        return self.api.requests

    def pods(self, ready: int) -> None:
        one = serving("e1", "127.0.0.2") if ready else pod("e1", podIP="127.0.0.2")
        self.now += 1
        one["metadata"] |= {"labels": {SERVICE_LABEL: "qwen"}, "resourceVersion": str(int(self.now))}
        self.api.store.put(POD, one)
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        self.api._change(lambda item: item.update(status={"conditions": [condition]}))


@pytest.fixture
async def sleeper(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sleeper]:
    async with machine(monkeypatch) as (server, api, probe):
        item = service({"replicas": 1, "autoscaling": {"min": 0, "max": 4, "idleSeconds": 60}})
        store = Store()
        store.put(SERVICE, item)
        server.pods = [serving("gw", "127.0.0.1")]
        own = SleepServer(Configuration(host=api._client.configuration.host))
        own.store, own.requests = store, []
        made = Sleeper(server, own, ServiceScaler(own, store, SETTINGS, probe))
        monkeypatch.setattr(service_scaler.time, "monotonic", lambda: made.now)
        made.gateway()
        made.pods(ready=1)
        try:
            yield made
        finally:
            await own.close()


async def test_a_service_without_requests_falls_asleep_and_a_request_wakes_it(sleeper: Sleeper) -> None:
    assert await sleeper.look(0) == []
    assert await sleeper.look(59) == []
    assert await sleeper.look(2) == ["mark", "scale 0"]
    assert sleeper.scaler.report(("team", "qwen")).message == "1 to 0 replicas: no request for 60 s"  # type: ignore[union-attr]
    assert await sleeper.look(3600) == await sleeper.wake() == []
    sleeper.gateway(in_flight=70)
    assert await sleeper.wake() == ["scale 2", "unmark"]
    # It had no request for an hour; but that was before.
    sleeper.gateway(ended=77)
    assert await sleeper.look(1) == []
    assert await sleeper.look(61) == ["mark", "scale 0"]


async def test_requests_between_two_looks_and_pods_that_start_keep_a_service_awake(sleeper: Sleeper) -> None:
    await sleeper.look(0)
    for ended in range(8, 12):
        sleeper.gateway(ended=ended)
        assert await sleeper.look(59) == []
    del sleeper.server.metrics["127.0.0.1"]  # a gateway that does not answer
    assert await sleeper.look(500) == []
    sleeper.gateway(ended=11)
    assert await sleeper.look(1) == []
    sleeper.pods(ready=0)
    assert await sleeper.look(500) == []
    sleeper.pods(ready=1)
    assert await sleeper.look(1) == []
    assert await sleeper.look(50) == []
    assert await sleeper.look(10) == ["mark", "scale 0"]


async def test_requests_past_the_gateway_keep_a_service_awake(sleeper: Sleeper) -> None:
    sleeper.server.metrics["127.0.0.2"] = "leadline_engine_running_requests 1\n"
    await sleeper.look(0)
    assert await sleeper.look(61) == []
    sleeper.server.metrics["127.0.0.2"] = "leadline_engine_running_requests 0\n"
    assert await sleeper.look(1) == []
    assert await sleeper.look(61) == ["mark", "scale 0"]


async def test_a_service_whose_rollout_is_stuck_keeps_its_old_pods(sleeper: Sleeper) -> None:
    await sleeper.look(0)
    stuck = {"type": "Ready", "status": "False", "reason": "RolloutBlocked"}
    sleeper.api._change(lambda item: item.update(status={"conditions": [stuck]}))
    assert await sleeper.look(61) == await sleeper.look(61) == []


async def test_a_service_that_no_gateway_knows_does_not_fall_asleep(sleeper: Sleeper) -> None:
    sleeper.server.metrics = {"127.0.0.2": "leadline_engine_running_requests 0\n"}
    sleeper.server.pods = []
    for _ in range(5):
        assert await sleeper.look(300) == []


async def test_a_service_that_was_switched_off_stays_off(sleeper: Sleeper) -> None:
    await sleeper.api.scale(SERVICE, "team", "qwen", 0)
    sleeper.gateway(in_flight=5)
    assert await sleeper.look(0) == await sleeper.wake() == []
    report = sleeper.scaler.report(("team", "qwen"))
    assert report is not None
    assert (report.active, report.message.partition(":")[0]) == (
        False,
        "replicas was set to 0, so the service is off",
    )
    await sleeper.api.scale(SERVICE, "team", "qwen", 1)
    assert await sleeper.look(1) == []
    assert sleeper.scaler.report(("team", "qwen")).active  # type: ignore[union-attr]


async def test_whoever_starts_a_sleeping_service_by_hand_can_switch_it_off(sleeper: Sleeper) -> None:
    await sleeper.look(0)
    assert await sleeper.look(61) == ["mark", "scale 0"]
    await sleeper.api.scale(SERVICE, "team", "qwen", 1)
    sleeper.api.stale = True  # the service may sleep again: without its mark it would be off
    assert await sleeper.wake() == []
    sleeper.api.stale = False
    assert await sleeper.wake() == ["unmark"]
    assert await sleeper.wake() == []
    await sleeper.api.scale(SERVICE, "team", "qwen", 0)
    sleeper.gateway(in_flight=5)
    assert await sleeper.look(1) == await sleeper.wake() == []


@pytest.mark.parametrize("asleep", [True, False])
async def test_whoever_switches_a_service_off_during_a_look_wins(
    asleep: bool, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleeper.look(0)
    if asleep:
        assert await sleeper.look(61) == ["mark", "scale 0"]
    item = sleeper.api.store.service(("team", "qwen"))
    assert item is not None
    views = sleeper.scaler._gateways.views

    async def off() -> list[GatewayView | None]:
        if asleep:
            await sleeper.api.annotate(SERVICE, item["metadata"], {ASLEEP_ANNOTATION: None})
        else:
            await sleeper.api.scale(SERVICE, "team", "qwen", 0)
        return await views()

    monkeypatch.setattr(sleeper.scaler._gateways, "views", off)
    sleeper.gateway(in_flight=90)
    assert await sleeper.look(1) == ["unmark" if asleep else "scale 0"]


async def test_a_sleeping_service_is_off_once_an_hpa_targets_it(sleeper: Sleeper) -> None:
    await sleeper.look(0)
    assert await sleeper.look(61) == ["mark", "scale 0"]
    sleeper.gateway(in_flight=1)
    sleeper.server.hpas = [scaler("InferenceService", "qwen")]
    assert await sleeper.look(1) == ["unmark"]
    assert await sleeper.look(1) == await sleeper.wake() == []


async def test_a_replica_that_leads_again_does_not_repeat_its_old_decisions(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleeper.look(0)
    assert await sleeper.look(61) == ["mark", "scale 0"]
    begun = asyncio.Event()

    async def look() -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(sleeper.scaler, "look", look)
    task = asyncio.create_task(sleeper.scaler.run())
    await begun.wait()
    task.cancel()
    assert sleeper.scaler.report(("team", "qwen")) is None
