"""Names and pods are those that the operator has put into the status of an InferenceService, no others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kube_script import inference_service, slice_of
from test_discovery import Watching, watching

from leadline.gateway.errors import NoPods, UnknownModel
from leadline.protocol.load import LoadReport
from live_valkey import until

ALL = {"discovery": {"namespace": "*"}}


def llm(names: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = ["qwen", "ns/llm"] if names is None else names
    return inference_service("ns/llm", **{"names": names, "service_uid": "s-llm", **more})


def of_tenant(**more: Any) -> dict[str, Any]:
    """A slice of a Service that a tenant has made in a namespace that sorts first."""
    return slice_of("evil", "thief", **{"service": "evil", "namespace": "aaa", "owner": "s-evil", **more})


def trusted(tmp_path: Path, *objects: dict[str, Any], **settings: Any) -> Any:
    return watching(tmp_path, *objects, trust="inferenceservices", settings={**ALL, **settings})


def leads(kube: Watching, model: str) -> str | None:
    try:
        return kube.table.resolve(model).name
    except (UnknownModel, NoPods):
        return None


async def test_a_service_has_the_names_and_the_pods_that_the_operator_published(tmp_path: Path) -> None:
    async with trusted(tmp_path, llm(), slice_of("s1", "a", owner="s-llm")) as kube:
        assert kube.pods() == {"a": "ready"}
        assert [leads(kube, name) for name in ("qwen", "ns/llm", "llm")] == ["ns/llm", "ns/llm", None]
        assert [card.id for card in kube.table.model_cards()] == ["qwen"]
        await kube.script.put(llm(["other", "ns/llm"]))
        await until(lambda: leads(kube, "other") == "ns/llm")
        assert leads(kube, "qwen") is None
        await kube.script.delete("llm")
        await until(lambda: kube.table.get("ns/llm") is None)


async def test_a_service_at_zero_is_known_by_its_names_before_it_has_a_slice(tmp_path: Path) -> None:
    """P22: a gateway that starts meanwhile must hold requests for it, not answer 404."""
    async with trusted(tmp_path, llm()) as kube:
        assert leads(kube, "qwen") == "ns/llm"
        assert kube.pods() == {}
        await kube.script.put(slice_of("s1", "a", owner="s-llm"))
        await until(lambda: kube.pods() == {"a": "ready"})


async def test_a_service_without_pods_tells_why_in_the_operators_word(tmp_path: Path) -> None:
    """And not in its message, which may name nodes and images."""

    def unready(status: str) -> dict[str, Any]:
        found = llm()
        message = "node-7 has no GPU left"
        ready = {"type": "Ready", "status": status, "reason": "Unschedulable", "message": message}
        found["status"]["conditions"] = [{"type": "NamesAccepted", "status": "False", "reason": "x"}, ready]
        return found

    async with trusted(tmp_path, llm()) as kube:
        service = kube.table.get("ns/llm")
        assert service is not None
        assert service.without_pods() == "ns/llm has no pod that takes requests"
        await kube.script.put(unready("False"))
        await until(lambda: "reports Unschedulable" in service.without_pods())
        assert "node-7" not in service.without_pods()
        await kube.script.put(unready("True"))
        await until(lambda: "Unschedulable" not in service.without_pods())


async def test_a_service_says_how_long_to_wait_for_its_first_pod(tmp_path: Path) -> None:
    def told(reason: str, progressing: str, **autoscaling: int) -> dict[str, Any]:
        found = llm(autoscaling={"max": 3, **autoscaling})
        found["status"]["conditions"] = [
            {"type": "Ready", "status": "False", "reason": reason},
            {"type": "Progressing", "status": progressing, "reason": reason},
        ]
        return found

    async with trusted(tmp_path, told("Asleep", "False", min=0, wakeSeconds=90)) as kube:
        service = kube.table.get("ns/llm")
        assert service is not None

        async def becomes(wake: float, stuck: bool, *said: Any, **autoscaling: int) -> None:
            await kube.script.put(told(*said, **autoscaling))
            await until(lambda: (service.wake_seconds, service.stuck) == (wake, stuck))

        assert (service.wake_seconds, service.stuck) == (90, False)
        await becomes(90, True, "ImagePullFailed", "False", min=0, wakeSeconds=90)
        await becomes(90, False, "CreatingPods", "True", min=0, wakeSeconds=90)
        await becomes(0, False, "ScaledToZero", "False", min=0, wakeSeconds=90)
        await becomes(300, False, "Asleep", "False", min=0)
        await becomes(0, False, "CreatingPods", "True", min=1)


@pytest.mark.parametrize(
    "forged",
    [
        of_tenant(),
        of_tenant(
            labels={
                "serving.leadline.io/service": "llm",
                "serving.leadline.io/served-names-0": "lmrhc53fnyrf2",
            }
        ),
        of_tenant(service="llm-engine", labels={"serving.leadline.io/service": "llm"}),
        of_tenant(owner="s-llm"),  # a uid that is another namespace's
        slice_of("evil", "thief", owner="s-evil"),  # a second Service with the labels, in the same namespace
        slice_of("evil", "thief"),
    ],
    ids=[
        "plain",
        "names in labels",
        "name of the Service",
        "uid of the Service",
        "same namespace",
        "no owner",
    ],
)
async def test_a_service_with_our_labels_that_a_tenant_has_made_gets_nothing(
    tmp_path: Path, forged: dict[str, Any]
) -> None:
    async with trusted(tmp_path, llm(), slice_of("s1", "a", owner="s-llm"), forged) as kube:
        await kube.script.put(slice_of("s1", "a", "b", owner="s-llm"))
        await until(lambda: kube.pods() == {"a": "ready", "b": "ready"})
        assert [service.name for service in kube.table] == ["ns/llm"]
        assert [leads(kube, name) for name in ("qwen", "evil", "aaa/evil", "aaa/llm")] == [
            "ns/llm",
            None,
            None,
            None,
        ]


async def test_names_that_pods_report_do_not_count(tmp_path: Path) -> None:
    thief = inference_service("aaa/evil", names=["evil", "aaa/evil"], service_uid="s-evil")
    async with trusted(tmp_path, llm(), thief, of_tenant()) as kube:
        await until(lambda: kube.pods("aaa/evil") == {"thief": "ready"})
        report = LoadReport(
            pod="thief",
            address="a",
            epoch="e",
            time=1,
            model="m",
            block_size=64,
            served_names=["qwen", "unclaimed", "ns/llm"],
        )
        kube.table.get("aaa/evil").pods["thief"].heartbeat(report, 0.0)
        kube.table.names_changed()
        assert [leads(kube, name) for name in ("qwen", "ns/llm", "unclaimed")] == ["ns/llm", "ns/llm", None]


async def test_what_the_spec_says_gives_no_name(tmp_path: Path) -> None:
    """Anybody may write any alias into a spec of theirs; the status is the operator's."""
    thief = inference_service("aaa/evil", names=["aaa/evil"], aliases=["qwen", "free"], servedName="gpt")
    async with trusted(tmp_path, llm(), thief) as kube:
        assert [leads(kube, name) for name in ("qwen", "free", "gpt")] == ["ns/llm", None, None]
        assert leads(kube, "aaa/evil") == "aaa/evil"


async def test_of_two_services_with_one_name_the_older_one_has_it(tmp_path: Path) -> None:
    """For a moment, or with two operators. The order in which a gateway hears of them does not matter."""
    older = inference_service("zzz/old", names=["qwen"], created="2026-11-30T11:00:00Z")
    for first, second in ((llm(), older), (older, llm())):
        async with trusted(tmp_path, first) as kube:
            await kube.script.put(second)
            await until(lambda: leads(kube, "qwen") == "zzz/old")


async def test_a_name_on_which_the_operator_has_yet_to_decide_is_no_404(tmp_path: Path) -> None:
    """An upgrade of operator and gateways at once, or a service made a moment ago."""
    new = inference_service("ns/new", aliases=["fresh"])
    async with trusted(tmp_path, llm(), new) as kube:
        for name in ("fresh", "new", "ns/new"):
            with pytest.raises(NoPods, match="has not decided") as caught:
                kube.table.resolve(name)
            assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "starting", 1)
        with pytest.raises(UnknownModel):
            kube.table.resolve("else")
        assert leads(kube, "qwen") == "ns/llm"


async def test_a_configured_service_takes_the_slices_that_its_entry_names(tmp_path: Path) -> None:
    by_hand = {"services": [{"name": "ns/hand", "kubernetes_service": "backend", "served_names": ["Q/1"]}]}
    plain = slice_of("s1", "a", service="backend", labels={})
    thief = inference_service("aaa/evil", names=["Q/1", "ns/hand"], created="2020-01-01T00:00:00Z")
    async with trusted(tmp_path, plain, thief, **by_hand) as kube:
        await until(lambda: kube.pods("ns/hand") == {"a": "ready"})
        assert [leads(kube, name) for name in ("Q/1", "ns/hand")] == ["ns/hand", "ns/hand"]


async def test_a_cluster_that_does_not_know_inferenceservices_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with trusted(tmp_path, slice_of("s1", "a", owner="s-llm")) as kube:
        kube.script.no_crd = True
        kube.script.status = 0
        assert [service.name for service in kube.table] == []
    async with trusted(tmp_path, llm()) as kube:
        kube.script.no_crd = True
        await kube.script.drop_connections()
        await asyncio.sleep(0)
        assert leads(kube, "qwen") == "ns/llm", "what was known stays"
