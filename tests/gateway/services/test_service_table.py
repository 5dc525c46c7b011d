"""Which service a request's model means: served names, aliases, any string (P17), canary weights."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.gateway.errors import ConfigError, UnknownModel
from leadline.gateway.pods import Pod
from leadline.gateway.policies.random_choice import RandomPolicy
from leadline.gateway.services import Service, ServiceTable
from leadline.protocol.load import LoadReport


def service(
    name: str, *served: str, reported: tuple[str, ...] = (), ready: bool = True, **more: int
) -> Service:
    made = Service(name=name, model="m", policy=RandomPolicy(), served_names=served)
    pod = Pod(f"{name}-0", "10.0.0.1:8000", ready=ready)
    made.pods[pod.id] = pod
    report = LoadReport(
        pod=pod.id,
        address="a",
        epoch="e",
        time=1,
        model="m",
        block_size=64,
        served_names=list(reported),
        **more,
    )
    pod.heartbeat(report, 0.0)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B",
        "meta.llama-3.1/8B_Instruct",
        "UPPER and spaces",
        "模型/七",
        "x" * 300,
        "../../etc/passwd",
        "a:b?c#d%20",
        "emoji-🦙",
        "\ud800",
    ],
)
def test_any_name_leads_to_its_service_configured_or_reported(name: str) -> None:
    table = ServiceTable([service("ns/a", name), service("ns/b", "other")])
    assert table.resolve(name).name == "ns/a"
    table = ServiceTable([service("ns/a"), service("ns/b", reported=(name,))])
    assert table.resolve(name).name == "ns/b"
    assert name in [shown for shown, _ in table.names()]


@given(st.lists(st.text(), unique=True, min_size=1, max_size=20), st.text())
def test_names_are_compared_as_they_are(names: list[str], other: str) -> None:
    table = ServiceTable([service(f"ns/s{place}", name) for place, name in enumerate(names)])
    for place, name in enumerate(names):
        assert table.resolve(name).name == f"ns/s{place}"
    known = {*names, *(f"ns/s{place}" for place in range(len(names))), *(f"s{p}" for p in range(len(names)))}
    if other not in known:
        with pytest.raises(UnknownModel):
            table.resolve(other)


def test_a_name_that_nobody_serves_is_a_404_of_openai_s_shape() -> None:
    with pytest.raises(UnknownModel) as refused:
        ServiceTable([service("ns/a", "a-model")]).resolve("n" * 5_000)
    error = refused.value
    assert (error.status, error.type, error.code, error.param) == (
        404,
        "not_found_error",
        "model_not_found",
        "model",
    )
    assert len(error.message) < 300


def test_several_names_of_one_service_and_its_own_name_all_work() -> None:
    table = ServiceTable([service("ns/qwen", "Q/1", "alias", reported=("served",))])
    for name in ("Q/1", "alias", "served", "ns/qwen", "qwen"):
        assert table.resolve(name).name == "ns/qwen"
    assert [name for name, _ in table.names()] == ["Q/1", "alias", "served"]


def test_a_service_without_served_names_is_listed_by_its_own() -> None:
    assert [name for name, _ in ServiceTable([service("ns/a")]).names()] == ["ns/a"]


def test_configured_names_go_before_reported_ones_and_the_first_service_wins() -> None:
    table = ServiceTable([service("ns/z", "x"), service("ns/a", reported=("x", "y")), service("ns/b", "w")])
    assert table.resolve("x").name == "ns/z"
    table.add(service("ns/0", reported=("y",)))
    assert table.resolve("y").name == "ns/0", "by service name, on every gateway alike"


def test_names_that_a_new_pod_reports_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("leadline.gateway.services.time.monotonic", lambda: clock[0])
    made = service("ns/a")
    table = ServiceTable([made])
    with pytest.raises(UnknownModel):
        table.resolve("late")
    made.pods["ns/a-0"].served_names = ("late",)
    clock[0] += 0.2
    assert table.resolve("late") is made


def test_a_service_scaled_to_zero_keeps_its_reported_names() -> None:
    made = service("ns/a", reported=("x",))
    table = ServiceTable([made, service("ns/b")])
    assert table.resolve("x") is made
    made.pods.clear()
    assert [name for name, found in table.names() if found is made] == ["x"]
    assert table.resolve("x") is made


def test_weights_share_a_name_between_services() -> None:
    table = ServiceTable(
        [service("ns/stable"), service("ns/canary")], {"x": {"ns/stable": 90, "ns/canary": 10}}
    )
    rng = random.Random(1)
    counts = Counter(table.resolve("x", rng).name for _ in range(10_000))
    assert 800 < counts["ns/canary"] < 1_200
    assert {name for name, _ in table.names()} == {"ns/canary", "ns/stable", "x"}


def test_a_weight_of_zero_gets_nothing_and_absent_services_are_passed_over() -> None:
    table = ServiceTable([service("ns/a"), service("ns/b")], {"x": {"ns/a": 0, "ns/b": 1, "ns/gone": 5}})
    assert {table.resolve("x").name for _ in range(50)} == {"ns/b"}


def test_a_canary_without_ready_pods_gets_nothing_unless_nobody_has_any() -> None:
    stable, canary = service("ns/stable"), service("ns/canary", ready=False)
    table = ServiceTable([stable, canary], {"x": {"ns/stable": 30, "ns/canary": 70}})
    assert {table.resolve("x").name for _ in range(50)} == {"ns/stable"}
    stable.pods["ns/stable-0"].ready = False
    assert {table.resolve("x").name for _ in range(100)} == {"ns/stable", "ns/canary"}


def test_a_canary_that_sleeps_keeps_its_share_until_its_pods_start() -> None:
    canary = service("ns/canary", ready=False)
    table = ServiceTable([service("ns/stable"), canary], {"x": {"ns/stable": 30, "ns/canary": 70}})
    canary.reason = "Asleep"
    assert {table.resolve("x").name for _ in range(100)} == {"ns/stable", "ns/canary"}
    canary.reason = "CreatingPods"
    assert {table.resolve("x").name for _ in range(50)} == {"ns/stable"}


@pytest.mark.parametrize("shares", [{}, {"ns/a": 0.0}, {"ns/a": -1.0, "ns/b": 2.0}])
def test_weights_that_cannot_work_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        ServiceTable([service("ns/a")], {"x": shares})


def test_services_can_be_removed() -> None:
    table = ServiceTable([service("ns/a", "x"), service("ns/b", "y")])
    assert table.remove("ns/a") is not None
    assert table.remove("ns/a") is None
    with pytest.raises(UnknownModel):
        table.resolve("x")
    with pytest.raises(ConfigError, match="two services"):
        table.add(service("ns/b"))


def test_a_request_without_a_model_means_the_only_service() -> None:
    table = ServiceTable([service("ns/a")])
    assert table.resolve(None).name == "ns/a"
    table.add(service("ns/b"))
    with pytest.raises(UnknownModel, match="missing"):
        table.resolve(None)


def test_model_cards_have_what_v1_models_shows() -> None:
    made = service("ns/a", "x", max_model_len=4096)
    other = Pod("p1", "10.0.0.2:8000")
    made.pods["p1"] = other
    (card,) = ServiceTable([made]).model_cards()
    assert (card.id, card.object, card.created, card.max_model_len) == ("x", "model", made.created, 4096)


def test_the_model_in_the_body_changes_only_where_the_pod_does_not_serve_the_name() -> None:
    made = service("ns/a", "alias", reported=("real",))
    pod = made.pods["ns/a-0"]
    assert made.upstream_model("real", pod) is None
    assert made.upstream_model("alias", pod) == "real"
    assert made.upstream_model("alias", Pod("new", "a:1")) is None, "nothing is known of it yet"
