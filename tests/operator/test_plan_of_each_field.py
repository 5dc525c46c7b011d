"""plan(): the objects of a service, and that each field of the spec has a case."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from operator_builders import (
    SETTINGS,
    condition,
    container,
    environment,
    observed,
    plan_of,
    pod_spec,
    volume,
    wanted,
)

from leadline.operator.planning.plan import Plan, plan
from leadline.protocol.isvc_types import InferenceServiceSpec


def test_the_service_tells_gateways_whose_it_is() -> None:
    """Gateways of another operator, which the NetworkPolicy keeps out, must not list its models as theirs."""
    named = replace(SETTINGS, operator_name="blue")
    labels = wanted(plan_of(settings=named), "Service")["metadata"]["labels"]
    assert labels["serving.leadline.io/operator"] == "blue"
    assert "serving.leadline.io/operator" not in wanted(plan_of(), "Service")["metadata"]["labels"]


def test_a_headless_service_with_our_label_leads_gateways_to_the_pods() -> None:
    made = wanted(plan_of(), "Service")
    assert made["spec"]["clusterIP"] == "None"
    assert made["metadata"]["labels"]["serving.leadline.io/service"] == "qwen"
    template = wanted(plan_of(), "Deployment")["spec"]["template"]
    assert made["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_node_drains_take_one_pod_at_a_time() -> None:
    made = wanted(plan_of(), "PodDisruptionBudget")["spec"]
    assert (made["maxUnavailable"], made["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_only_the_gateway_the_operator_and_monitoring_may_reach_a_pod() -> None:
    settings = replace(SETTINGS, gateway_namespace="gw", monitoring_namespace="prom")
    (rule,) = wanted(plan_of(settings=settings), "NetworkPolicy")["spec"]["ingress"]
    spaces = [one["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for one in rule["from"]]
    assert spaces == ["gw", "system", "prom"]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert rule["ports"] == [{"port": 8000, "protocol": "TCP"}]
    off = plan_of(settings=replace(SETTINGS, network_policies=False))
    assert "NetworkPolicy" not in [one["kind"] for one in off.desired or []]


def test_the_redis_password_goes_through_a_secret_and_its_change_starts_no_pod_anew() -> None:
    plain = plan_of(settings=replace(SETTINGS, redis_url="redis://valkey:6379"))
    assert environment(plain)["LEADLINE_REDIS_URL"] == "redis://valkey:6379"
    assert "LEADLINE_REDIS_CREDENTIALS" not in environment(plain)
    for field, url in (
        ("redis_url", "redis://me:{}@valkey:6379/0"),
        ("redis_admin_url", "redis://admin:{}@valkey:6379/0"),
    ):
        made = [
            plan_of(settings=replace(SETTINGS, **{field: url.format(word)})) for word in ("s3cret", "0ther")
        ]
        assert environment(made[0])["LEADLINE_REDIS_URL"] == "redis://valkey:6379/0"
        folder = environment(made[0])["LEADLINE_REDIS_CREDENTIALS"]
        assert {"name": "redis", "mountPath": folder, "readOnly": True} in container(made[0])["volumeMounts"]
        assert volume(pod_spec(made[0]), "redis")["secret"]["secretName"] == "qwen-redis"
        assert "s3cret" not in str([one for one in made[0].desired or [] if one["kind"] != "Secret"])
        templates = [wanted(one, "Deployment")["spec"]["template"] for one in made]
        assert templates[0] == templates[1], "no pod starts anew"
        # It is by the Deployment that the Secret is applied again: a Secret is not read back.
        assert (
            len(
                {
                    wanted(one, "Deployment")["metadata"]["annotations"]["serving.leadline.io/redis-hash"]
                    for one in made
                }
            )
            == 2
        )


def test_each_service_has_a_redis_user_of_its_own() -> None:
    settings = replace(SETTINGS, redis_admin_url="redis://admin:s3cret@valkey:6379/0")

    def login(made: Plan) -> list[str]:
        data = wanted(made, "Secret")["data"]
        return [base64.b64decode(data[name]).decode() for name in ("username", "password")]

    one = observed()
    first, again = (login(plan(one, settings)) for _ in range(2))
    assert first == again, "derived, not drawn: a restart of the operator changes nothing"
    assert first[0] == "system/leadline-operator:team/qwen"
    one.service["metadata"]["uid"] = "uid-2"
    assert login(plan(one, settings))[1] != first[1], "a successor of the same name"
    assert "s3cret" not in str(first)


def test_everything_is_owned_by_the_service_and_nothing_has_a_finalizer() -> None:
    made = plan_of({"cache": {"size": "1Gi"}, "engine": {"warmupPrompts": ["Hi"]}})
    assert len(made.desired or []) == 7
    for one in made.desired or []:
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-1", True)
        assert "finalizers" not in one["metadata"]
        assert one["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("served", ["Qwen/Qwen3-8B", "A" * 200, "模型", "a.b/c:d@e"])
def test_labels_and_names_do_not_depend_on_what_the_model_is_called(served: str) -> None:
    made = plan_of({"servedName": served, "aliases": [served + "x"]})
    for one in made.desired or []:
        labels = one["metadata"]["labels"]
        assert all(
            re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value) for value in labels.values()
        )
        assert labels == wanted(plan_of(), one["kind"])["metadata"]["labels"]
        assert one["metadata"]["name"] == wanted(plan_of(), one["kind"])["metadata"]["name"]


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"quantization": "none", "kvCacheDtype": "auto"}},
        {"autoscaling": {"min": 1, "max": 2, "targetConcurrency": 5}},  # the autoscaler's, not the objects'
    ],
)
def test_what_does_not_concern_the_objects_changes_none(spec: dict[str, Any]) -> None:
    assert plan_of(spec).desired == plan_of().desired


def test_planning_is_a_function_of_its_input() -> None:
    assert plan_of({"replicas": 2}).desired == plan_of({"replicas": 2}).desired


def test_what_is_no_longer_wanted_is_deleted_and_what_others_own_is_not() -> None:
    def config_map(name: str, owner: str) -> dict[str, Any]:
        owners = [{"uid": owner, "controller": True}]
        return {"kind": "ConfigMap", "metadata": {"name": name, "uid": name, "ownerReferences": owners}}

    children = {
        ("ConfigMap", "qwen-engine"): config_map("qwen-engine", "uid-1"),
        ("ConfigMap", "other"): config_map("other", "uid-2"),
    }
    made = plan_of(children=children)
    assert [one["metadata"]["name"] for one in made.delete] == ["qwen-engine"]


def test_an_object_of_our_name_that_belongs_to_somebody_else_is_not_taken_over() -> None:
    theirs = {"kind": "Service", "metadata": {"name": "qwen-engine", "uid": "u", "labels": {}}}
    made = plan_of(children={("Service", "qwen-engine"): theirs})
    assert made.desired is None
    assert condition(made)["reason"] == "NameTaken"
    assert "Service qwen-engine" in condition(made)["message"]


def test_a_spec_that_cannot_be_read_or_cannot_work_is_a_condition_and_touches_nothing() -> None:
    unreadable = plan_of({"replicas": "three"})
    assert unreadable.desired is None
    assert condition(unreadable)["reason"] == "InvalidSpec"
    assert "replicas" in condition(unreadable)["message"]
    split = plan_of({"tensorParallel": 2}, settings=replace(SETTINGS, accelerator="cpu"))
    assert split.desired is None
    assert "accelerator.type" in condition(split)["message"]


def test_every_field_of_the_spec_is_covered_here() -> None:
    """A new field must come with a case: its JSON name stands in one of the files on plan()."""
    files = Path(__file__).parent.glob("test_plan_of_*.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)

    def names(struct: type[msgspec.Struct]) -> list[str]:
        found = []
        for field in msgspec.structs.fields(struct):
            found.append(field.encode_name)
            for part in (field.type, *getattr(field.type, "__args__", ())):
                if isinstance(part, type) and issubclass(part, msgspec.Struct):
                    found += names(part)
        return found

    assert [name for name in names(InferenceServiceSpec) if f'"{name}"' not in text] == []


def test_the_url_is_the_gateways_where_there_is_one() -> None:
    assert plan_of().status["url"] == "http://qwen-engine.team.svc:8000/v1"
    made = plan_of(settings=replace(SETTINGS, gateway_url="https://llm.example.com/"))
    assert made.status["url"] == "https://llm.example.com/v1"


def test_the_status_carries_what_scale_needs() -> None:
    made = plan_of({"replicas": 2})
    assert made.status["selector"] == "app.kubernetes.io/component=engine,serving.leadline.io/service=qwen"
    assert (made.status["replicas"], made.status["observedGeneration"]) == (0, 1)
