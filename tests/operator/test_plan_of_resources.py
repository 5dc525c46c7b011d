"""plan(): the accelerators, CPU and memory that the containers request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import GPU, SETTINGS, container, download, plan_of

from leadline.operator.objects.containers import parameters_of


def test_each_pod_asks_for_as_many_accelerators_as_the_model_is_spread_over() -> None:
    resources = container(plan_of({"tensorParallel": 4}))["resources"]
    assert resources["limits"] == {GPU: "4"}
    assert resources["requests"] == {GPU: "4", "cpu": "4", "memory": "16Gi"}


def test_another_accelerator_is_asked_for_by_its_own_name() -> None:
    made = plan_of({"accelerator": {"resourceName": "amd.com/gpu"}})
    assert container(made)["resources"]["limits"] == {"amd.com/gpu": "1"}


def test_a_cpu_service_asks_for_no_accelerator_and_takes_the_cpu_image() -> None:
    engine = container(plan_of({"accelerator": {"type": "cpu"}}))
    assert engine["resources"].keys() == {"requests"}
    assert GPU not in engine["resources"]["requests"]
    assert engine["image"] == "engine-cpu:1"


ALL = {"cpu": "16", "memory": "64Gi"}


def resources(engine: dict[str, Any], fetch: dict[str, Any] | None = None) -> dict[str, Any]:
    patch: dict[str, Any] = {"containers": [{"name": "engine", "resources": engine}]}
    if fetch is not None:
        patch["initContainers"] = [{"name": "download", "resources": fetch}]
    return {"podTemplate": {"spec": patch}}


def test_a_pod_whose_engine_has_limits_may_be_guaranteed_although_it_downloads() -> None:
    """QoS counts init containers: kubernetes.io/docs/concepts/workloads/pods/pod-qos."""
    made = plan_of(resources({"requests": ALL, "limits": ALL}))
    assert container(made)["resources"] == {"requests": {**ALL, GPU: "1"}, "limits": {**ALL, GPU: "1"}}
    assert download(made)["resources"] == {"requests": ALL, "limits": ALL}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {"requests": {"cpu": "1", "memory": "4Gi"}}),
        (resources({"limits": {"example.com/nic": "1"}}), {"requests": {"cpu": "1", "memory": "4Gi"}}),
        (resources({"requests": {"cpu": "2"}}), {"requests": {"cpu": "2", "memory": "4Gi"}}),
        (resources({"limits": ALL}, {"limits": {"cpu": "1"}}), {"limits": {"cpu": "1"}}),
        (resources({"limits": ALL}, {}), {}),
    ],
)
def test_a_download_gets_what_the_patch_says_else_the_engines_cpu_and_memory(
    spec: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert download(plan_of(spec)).get("resources") == expected


CPU = {"accelerator": {"type": "cpu"}}

REQUESTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "with each GPU": ({"tensorParallel": 2}, {GPU: "2", "cpu": "2", "memory": "8Gi"}),
    "the demo model": ({"model": "smollm2", **CPU}, {"cpu": "500m", "memory": "2050Mi"}),
    "weights in float32": (
        {"model": "hf://Qwen/Qwen3-0.6B@main", **CPU},
        {"cpu": "500m", "memory": "3825Mi"},
    ),
    "weights in half of it": (
        {"model": "hf://Qwen/Qwen3-8B", "engine": {"dtype": "bfloat16"}, **CPU},
        {"cpu": "500m", "memory": "16795Mi"},
    ),
    "a model of unknown size": ({"model": "pvc://models/8B", **CPU}, {"cpu": "500m", "memory": "1536Mi"}),
    "weights of unknown bits": ({"model": "hf://q/Qwen3-8B-AWQ", **CPU}, {"cpu": "500m", "memory": "1536Mi"}),
    "the service's own, resource by resource": (
        {**resources({"requests": {"memory": "9Gi"}}), **CPU},
        {"cpu": "500m", "memory": "9Gi"},
    ),
    "none beside a limit, which stands for a request": (
        {**resources({"limits": {"cpu": "2", "memory": "9Gi"}}), **CPU},
        {},
    ),
    "none beside those of the whole pod": (
        {"podTemplate": {"spec": {"resources": {"requests": {"cpu": "2"}}}}, **CPU},
        {},
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_an_engine_asks_for_cpu_and_memory_where_its_service_does_not_say(case: str) -> None:
    spec, expected = REQUESTS[case]
    assert container(plan_of(spec)).get("resources", {}).get("requests", {}) == expected


def test_what_a_namespaces_limit_range_gives_is_left_to_it() -> None:
    made = plan_of(CPU, limited=frozenset({"memory"}))
    assert container(made)["resources"] == {"requests": {"cpu": "500m"}}
    assert "resources" not in container(plan_of(CPU, limited=frozenset({"cpu", "memory"})))


def test_the_operators_settings_say_what_engines_ask_for() -> None:
    made = plan_of(settings=replace(SETTINGS, gpu_requests={"cpu": "1500m"}), spec={"tensorParallel": 3})
    assert container(made)["resources"]["requests"] == {GPU: "3", "cpu": "4500m"}
    assert "resources" not in container(plan_of(CPU, settings=replace(SETTINGS, cpu_requests={})))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("hf://Qwen/Qwen3-30B-A3B", 30),
        ("hf://meta-llama/Llama-3.1-8B-Instruct@v1.0", 8),
        ("hf://HuggingFaceTB/SmolLM2-135M-Instruct", 0.135),
        ("hf://google/gemma-3-1b-it", 1),
        ("hf://mistralai/Mixtral-8x7B", 0),
        ("hf://microsoft/phi-4", 0),
        ("hf://Qwen/Qwen3-8B-FP8", 0),
        ("hf://7b/model", 0),
        ("pvc://claim/Qwen3-8B", 0),
    ],
)
def test_the_size_of_a_model_is_what_its_name_tells(model: str, billions: float) -> None:
    assert parameters_of(model) == round(billions * 1e9)
