"""plan(): what each field of the spec does to the objects."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from operator_builders import (
    GPU,
    SETTINGS,
    condition,
    container,
    deployment,
    download,
    environment,
    observed,
    plan_of,
    pod_spec,
    wanted,
)

from leadline.operator.objects.requests import parameters_of
from leadline.operator.planning.observed import ScalingReport, Target
from leadline.operator.planning.plan import Plan, plan
from leadline.protocol.isvc_types import InferenceServiceSpec


def volume(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in spec["volumes"] if one["name"] == name)


# -- arguments of the engine: field of the spec → argument -------------------------------------------------

ARGUMENTS = {
    "a hub model is the engine's to fetch": ({}, "hf://Qwen/Qwen3-8B"),
    "a claim's folder": ({"model": "pvc://models/llama/8b/"}, "/model/llama/8b"),
    "a claim as a whole": ({"model": "pvc://models"}, "/model"),
    "a folder of the image": ({"model": "file:///opt/model"}, "file:///opt/model"),
    "the demo model": ({"model": "smollm2"}, "smollm2"),
    "servedName left out": ({}, "--served-name=qwen"),
    "servedName may be anything": ({"servedName": "Ünï/Code.X"}, "--served-name=Ünï/Code.X"),
    "tensorParallel": ({"tensorParallel": 4}, "--tensor-parallel=4"),
    "drainSeconds": ({"rollout": {"drainSeconds": 7}}, "--drain-timeout=7"),
    "accelerator.type gpu": ({"accelerator": {"type": "gpu"}}, "--device=cuda"),
    "accelerator.type cpu": ({"accelerator": {"type": "cpu"}}, "--device=cpu"),
    "maxModelLen": ({"engine": {"maxModelLen": 4096}}, "--max-model-len=4096"),
    "blockSize": ({"engine": {"blockSize": 32}}, "--block-size=32"),
    "gpuMemoryUtilization": ({"engine": {"gpuMemoryUtilization": 0.8}}, "--gpu-memory-utilization=0.8"),
    "dtype": ({"engine": {"dtype": "bfloat16"}}, "--dtype=bfloat16"),
    "quantization": ({"engine": {"quantization": "fp8"}}, "--quantization=fp8"),
    "kvCacheDtype": ({"engine": {"kvCacheDtype": "fp8"}}, "--kv-cache-dtype=fp8"),
    "maxConcurrentRequests": ({"engine": {"maxConcurrentRequests": 9}}, "--max-concurrent-requests=9"),
    "extraArgs": ({"engine": {"extraArgs": ["--prefill-chunk=64"]}}, "--prefill-chunk=64"),
    "warmupPrompts": ({"engine": {"warmupPrompts": ["Hi"]}}, "--warmup-file=/etc/leadline/warmup.txt"),
    "to run beside its accelerator": ({}, "--numa=auto"),
    "to run beside its accelerators": ({"tensorParallel": 8}, "--numa=auto"),
    "another argument that begins alike": ({"engine": {"extraArgs": ["--numax"]}}, "--numa=auto"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_the_engine_is_told(case: str) -> None:
    spec, argument = ARGUMENTS[case]
    assert argument in container(plan_of(spec))["args"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"engine": {"extraArgs": ["--numa=off"]}}, ["--numa=off"]),
        ({"engine": {"extraArgs": ["--numa", "1"]}}, ["--numa", "1"]),
        ({"accelerator": {"type": "cpu"}}, []),
    ],
)
def test_where_the_engine_runs_is_a_hint_for_accelerators_and_extra_args_win(
    spec: dict[str, Any], told: list[str]
) -> None:
    arguments = container(plan_of(spec))["args"]
    assert [one for one in arguments if one.startswith("--numa")] == told[:1]
    assert arguments[len(arguments) - len(told) :] == told


def test_the_engine_accepts_every_argument_the_operator_may_write() -> None:
    import argparse

    from leadline.cli.serve import add_arguments

    everything = {
        "engine": {
            "maxModelLen": 64,
            "blockSize": 32,
            "gpuMemoryUtilization": 0.5,
            "dtype": "float32",
            "quantization": "fp8",
            "kvCacheDtype": "fp8",
            "maxConcurrentRequests": 2,
            "warmupPrompts": ["Hi"],
        },
        "rollout": {"drainSeconds": 3},
    }
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    command, *arguments = container(plan_of(everything))["args"]
    assert command == "serve"
    parsed = parser.parse_args(arguments)
    assert (parsed.port, parsed.max_model_len, parsed.drain_timeout) == (8000, 64, 3.0)
    assert parsed.host == "::", "pods have addresses of IPv4, IPv6 or both"
    assert parsed.numa == "auto"


def test_the_service_tells_gateways_whose_it_is() -> None:
    """Gateways of another operator, which the NetworkPolicy keeps out, must not list its models as theirs."""
    named = replace(SETTINGS, operator_name="blue")
    labels = wanted(plan_of(settings=named), "Service")["metadata"]["labels"]
    assert labels["serving.leadline.io/operator"] == "blue"
    assert "serving.leadline.io/operator" not in wanted(plan_of(), "Service")["metadata"]["labels"]


# -- pod template ------------------------------------------------------------------------------------------


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


def test_the_operators_default_decides_where_a_service_that_does_not_say_runs() -> None:
    assert container(plan_of())["image"] == "engine:1"
    assert container(plan_of(settings=replace(SETTINGS, accelerator="cpu")))["image"] == "engine-cpu:1"


def test_the_services_image_goes_before_the_operators() -> None:
    assert container(plan_of({"image": "mine:2"}))["image"] == "mine:2"


def test_node_selector_tolerations_runtime_class_and_priority_reach_the_pod() -> None:
    tolerations = [
        {"key": GPU, "operator": "Exists", "tolerationSeconds": 3},
        {"key": "team", "operator": "Equal", "value": "llm", "effect": "NoSchedule"},
    ]
    spec = pod_spec(
        plan_of(
            {
                "accelerator": {
                    "nodeSelector": {"gpu": "h200"},
                    "tolerations": tolerations,
                    "runtimeClassName": "nvidia",
                },
                "priorityClassName": "high",
            }
        )
    )
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"] == tolerations
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("nvidia", "high")


def test_ranks_get_shared_memory_and_meet_over_loopback() -> None:
    made = plan_of({"tensorParallel": 8})
    assert volume(pod_spec(made), "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "5Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(made)["volumeMounts"]
    assert environment(made)["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in environment(plan_of())


def test_a_long_load_is_allowed_for_and_bounded() -> None:
    engine = container(plan_of({"engine": {"startupSeconds": 601}}))
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 602
    assert probe["httpGet"]["path"] == engine["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert engine["livenessProbe"]["httpGet"]["path"] == "/health"
    made = wanted(plan_of({"engine": {"startupSeconds": 601}}), "Deployment")
    assert made["spec"]["progressDeadlineSeconds"] > 601


def test_a_leaving_pod_has_time_to_leave_the_endpoints_drain_and_end() -> None:
    made = plan_of({"rollout": {"drainSeconds": 100}})
    pause = container(made)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod_spec(made)["terminationGracePeriodSeconds"] > 100 + pause > 100


def test_the_pod_meets_the_restricted_level_of_pod_security() -> None:
    made = plan_of()
    spec, engine = pod_spec(made), container(made)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert {"hostNetwork", "hostIPC", "hostPID"}.isdisjoint(spec)


def test_a_hub_model_is_downloaded_by_an_init_container_into_the_cache_of_the_engine() -> None:
    made = plan_of({"model": "hf://Qwen/Qwen3-8B@v1", "image": "mine:2", "cache": {"size": "20Gi"}})
    fetch, engine = download(made), container(made)
    assert fetch["args"] == ["model-path", "hf://Qwen/Qwen3-8B@v1", "--progress-port=8000"]
    assert (fetch["image"], fetch["command"]) == (engine["image"], engine["command"])
    assert fetch["securityContext"] == engine["securityContext"]
    mount = {"name": "cache", "mountPath": "/cache"}
    assert mount in fetch["volumeMounts"]
    assert mount in engine["volumeMounts"]
    for name in ("HF_HOME", "LEADLINE_CACHE"):
        assert environment(made, download)[name] == environment(made)[name]
    # A restart of the engine does not ask the hub again; and the download takes no accelerator.
    assert environment(made)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(made, download)
    assert fetch["resources"] == {"requests": {"cpu": "1", "memory": "4Gi"}}
    assert environment(made, download)["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize("model", ["smollm2", "pvc://models/llama", "file:///opt/model"])
def test_a_model_that_is_there_is_not_downloaded(model: str) -> None:
    made = plan_of({"model": model})
    assert "initContainers" not in pod_spec(made)
    assert "HF_HUB_OFFLINE" not in environment(made)


def test_the_command_line_knows_what_the_init_container_asks_of_it() -> None:
    import argparse

    from leadline.cli.model_path import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    assert parser.parse_args(download(plan_of())["args"][1:]).progress_port == 8000


def test_the_hubs_token_comes_from_the_secret_and_only_the_download_knows_it() -> None:
    made = plan_of({"tokenSecretRef": {"name": "hub", "key": "hf"}})
    assert environment(made, download)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "hf"}}
    assert "HF_TOKEN" not in environment(made)
    assert "HF_TOKEN" not in environment(plan_of(), download)
    default = environment(plan_of({"tokenSecretRef": {"name": "hub"}}), download)["HF_TOKEN"]
    assert default["secretKeyRef"]["key"] == "token"


def test_why_a_container_ended_is_read_from_where_it_writes_it() -> None:
    made = plan_of()
    for one in (container(made), download(made)):
        assert one["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert {"name": "LEADLINE_TERMINATION_LOG", "value": one["terminationMessagePath"]} in one["env"]


def test_aliases_reach_the_engine() -> None:
    assert environment(plan_of({"aliases": ["a", "B/c"]}))["LEADLINE_ALIASES"] == "a,B/c"


def test_labels_of_the_kubernetes_service_say_nothing_of_names() -> None:
    """Anybody can put labels on a Service of their own: gateways read names out of the status."""
    labels = [wanted(plan_of(spec), "Service")["metadata"]["labels"] for spec in ({}, {"aliases": ["a"]})]
    assert labels[0] == labels[1]


def test_a_pods_identity_for_gateways_is_its_own() -> None:
    made = environment(plan_of())
    assert made["LEADLINE_SERVICE"] == "team/qwen"
    assert made["LEADLINE_POD_NAME"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert made["LEADLINE_ADVERTISE_ADDRESS"] == "$(POD_IP):8000"


def test_a_models_claim_is_mounted_read_only() -> None:
    made = plan_of({"model": "pvc://models/llama"})
    claim = {"claimName": "models", "readOnly": True}
    assert volume(pod_spec(made), "model")["persistentVolumeClaim"] == claim
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in container(made)["volumeMounts"]


def test_warmup_prompts_become_a_file_and_a_change_of_them_starts_pods_anew() -> None:
    one, two = ({"engine": {"warmupPrompts": prompts}} for prompts in (["Hi"], ["Hi", "You are"]))
    assert wanted(plan_of(two), "ConfigMap")["data"] == {"warmup.txt": "Hi\nYou are\n"}
    templates = [wanted(plan_of(spec), "Deployment")["spec"]["template"] for spec in (one, two)]
    assert templates[0]["metadata"]["annotations"] != templates[1]["metadata"]["annotations"]
    assert not [made for made in plan_of().desired or [] if made["kind"] == "ConfigMap"]


def test_a_cache_becomes_a_claim_of_the_pods() -> None:
    made = plan_of({"cache": {"size": "5Gi", "storageClass": "fast", "accessMode": "ReadWriteMany"}})
    assert wanted(made, "PersistentVolumeClaim")["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }
    assert volume(pod_spec(made), "cache")["persistentVolumeClaim"] == {"claimName": "qwen-engine"}
    assert volume(pod_spec(plan_of()), "cache")["emptyDir"] == {}


def test_a_cache_that_exists_is_used_and_not_made() -> None:
    made = plan_of({"cache": {"claimName": "models"}})
    assert volume(pod_spec(made), "cache")["persistentVolumeClaim"] == {"claimName": "models"}
    assert "PersistentVolumeClaim" not in [one["kind"] for one in made.desired or []]


def claim(size: str = "5Gi", **more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """As `Observed.children`: the claim that `cache.size` made."""
    made: dict[str, Any] = {
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "qwen-engine",
            "uid": "uid-c",
            "labels": {"app.kubernetes.io/managed-by": "leadline-operator"},
            "ownerReferences": [{"uid": "uid-1", "controller": True}],
            **more,
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": size}},
        },
    }
    return {("PersistentVolumeClaim", "qwen-engine"): made}


@pytest.mark.parametrize("cache", [None, {"claimName": "models"}])
def test_the_claim_with_the_models_outlives_a_cache_that_no_longer_uses_it(cache: Any) -> None:
    spec = {} if cache is None else {"cache": cache}
    made = plan_of(spec, children=claim())
    assert made.delete == []
    assert made.status["retainedClaim"] == "qwen-engine"
    assert "claim qwen-engine (5Gi)" in condition(made)["message"]
    assert "`kubectl delete pvc qwen-engine` frees it" in condition(made)["message"]
    (told,) = [one for one in made.events if one.reason == "CacheRetained"]
    assert (told.warning, "cache.claimName qwen-engine uses it again" in told.message) == (False, True)
    said = observed(spec, children=claim())
    said.service["status"] = made.status
    assert not [one for one in plan(said, SETTINGS).events if one.reason == "CacheRetained"], "said once"


@pytest.mark.parametrize(
    ("spec", "retained"),
    [
        ({"cache": {"size": "5Gi"}}, False),
        ({"cache": {"claimName": "qwen-engine"}}, False),
        ({"model": "pvc://qwen-engine/models/x"}, False),
        ({"model": "pvc://qwen"}, True),
    ],
)
def test_a_claim_that_is_used_is_not_said_to_be_left_over(spec: dict[str, Any], retained: bool) -> None:
    made = plan_of(spec, children=claim())
    assert made.delete == []
    assert ("retainedClaim" in made.status) == retained


def test_a_claim_goes_with_its_cache_only_where_that_was_asked_for_before() -> None:
    asked = wanted(plan_of({"cache": {"size": "5Gi", "retain": False}}), "PersistentVolumeClaim")["metadata"]
    annotations = {"serving.leadline.io/retain": "false"}
    assert annotations.items() <= asked["annotations"].items()
    plain = wanted(plan_of({"cache": {"size": "5Gi"}}), "PersistentVolumeClaim")["metadata"]
    assert "serving.leadline.io/retain" not in plain["annotations"]
    made = plan_of(children=claim(annotations=annotations))
    assert [one["metadata"]["name"] for one in made.delete] == ["qwen-engine"]
    assert "retainedClaim" not in made.status
    assert (
        plan_of({"cache": {"claimName": "qwen-engine"}}, children=claim(annotations=annotations)).delete == []
    )


@pytest.mark.parametrize(
    ("cache", "field"),
    [
        ({"size": "4096Mi"}, "cache.size"),
        ({"size": "5Gi", "storageClass": "slow"}, "cache.storageClass"),
        ({"size": "5Gi", "accessMode": "ReadWriteMany"}, "cache.accessMode"),
    ],
)
def test_a_cache_that_the_claim_there_is_cannot_serve_is_refused_and_the_claim_stays(
    cache: dict[str, Any], field: str
) -> None:
    made = plan_of({"cache": cache}, children=claim())
    assert (made.desired, made.delete) == (None, [])
    assert condition(made)["reason"] == "InvalidSpec"
    assert condition(made)["message"].startswith(f"{field} cannot be had: the service's claim qwen-engine")
    assert "delete" not in condition(made)["message"]


def test_a_cache_that_comes_back_keeps_the_storage_class_that_its_claim_was_given() -> None:
    """An apply that leaves out what an earlier one set would take it away, which claims do not allow."""
    fields = {"f:spec": {"f:storageClassName": {}}}
    given = claim(managedFields=[{"manager": "leadline-operator", "fieldsV1": fields}])
    spec = {"cache": {"size": "6Gi"}}
    made = wanted(plan_of(spec, children=given), "PersistentVolumeClaim")["spec"]
    assert (made["storageClassName"], made["resources"]["requests"]["storage"]) == ("fast", "6Gi")
    assert "storageClassName" not in wanted(plan_of(spec, children=claim()), "PersistentVolumeClaim")["spec"]


def test_pods_that_share_a_claim_of_one_node_prefer_one_node() -> None:
    made = pod_spec(plan_of({"cache": {"size": "5Gi"}, "replicas": 2}))
    (one,) = made["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert one["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert one["podAffinityTerm"]["labelSelector"]["matchLabels"]["serving.leadline.io/service"] == "qwen"
    assert "topologySpreadConstraints" not in made, "they would pull the other way"
    for cache in ({"size": "5Gi", "accessMode": "ReadWriteMany"}, {"claimName": "models"}):
        made = pod_spec(plan_of({"cache": cache}))
        assert "affinity" not in made
        assert made["topologySpreadConstraints"]
    # Whether there is more than one pod is not asked: a change of scale must not replace the pods.
    templates = [
        wanted(plan_of({"cache": {"size": "5Gi"}, "replicas": number}), "Deployment")["spec"]["template"]
        for number in (1, 2)
    ]
    assert templates[0] == templates[1]


def test_the_pod_template_patch_has_the_last_word_but_not_over_the_selector() -> None:
    made = plan_of(
        {
            "podTemplate": {
                "metadata": {"labels": {"team": "x", "serving.leadline.io/service": "other"}},
                "spec": {
                    "containers": [
                        {
                            "name": "engine",
                            "env": [{"name": "HOME", "value": "/home"}],
                            "resources": {"limits": {"cpu": "4"}},
                        },
                        {"name": "sidecar", "image": "s:1"},
                    ]
                },
            }
        }
    )
    template = wanted(made, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "x"
    assert template["metadata"]["labels"]["serving.leadline.io/service"] == "qwen"
    engine, sidecar = template["spec"]["containers"]
    assert sidecar == {"name": "sidecar", "image": "s:1"}
    assert {"name": "HOME", "value": "/home"} in engine["env"]
    assert engine["resources"]["limits"] == {GPU: "1", "cpu": "4"}


ALL = {"cpu": "16", "memory": "64Gi"}


def resources(engine: dict[str, Any], fetch: dict[str, Any] | None = None) -> dict[str, Any]:
    patch: dict[str, Any] = {"containers": [{"name": "engine", "resources": engine}]}
    if fetch is not None:
        patch["initContainers"] = [{"name": "download", "resources": fetch}]
    return {"podTemplate": {"spec": patch}}


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"containers": {"engine": {}}}, "spec.containers must be a list of maps, each with name"),
        ({"containers": [{"image": "x"}]}, "spec.containers must be a list of maps, each with name"),
        (
            {"containers": [{"name": "engine", "env": {"A": "b"}}]},
            "spec.containers[0].env must be a list of maps, each with name",
        ),
        (
            {"containers": [{"name": "other"}, {"name": "engine", "env": ["A=b"]}]},
            "spec.containers[1].env must be a list of maps, each with name",
        ),
        (
            {"containers": [{"name": "engine", "resources": "2"}]},
            "spec.containers[0].resources must be a map",
        ),
        ("x", "spec must be a map"),
    ],
)
def test_a_pod_template_of_another_shape_is_named(patch: Any, sentence: str) -> None:
    made = plan_of({"podTemplate": {"spec": patch}}, children=deployment())
    assert condition(made)["reason"] == "InvalidSpec"
    assert condition(made)["message"] == f"podTemplate.{sentence}"
    assert made.desired is None, "what there is stays"


@pytest.mark.parametrize(
    ("model", "patch", "sentence"),
    [
        (
            "smollm2",
            {"containers": [{"name": "engin", "env": []}]},
            "containers: 'engin' has no image and is no container of the operator's: did you mean 'engine'?",
        ),
        (
            "smollm2",
            {"containers": [{"name": "engines", "$patch": "delete"}]},
            "containers: 'engines' has no image and is no container of the operator's: "
            "did you mean 'engine'?",
        ),
        (
            "smollm2",
            {"initContainers": [{"name": "download", "env": []}]},
            "initContainers: 'download' is there for hf:// models only: 'smollm2' is not downloaded",
        ),
        (
            "hf://a/b",
            {"containers": [{"name": "download"}]},
            "containers: 'download' is one of initContainers",
        ),
        (
            "smollm2",
            {"initContainers": [{"name": "prepare"}]},
            "initContainers: 'prepare' has no image and is no container of the operator's",
        ),
        ("smollm2", {"containers": [{"name": "sidecar", "image": "s:1"}]}, ""),
        ("hf://a/b", {"initContainers": [{"name": "download", "$patch": "delete"}]}, ""),
        ("smollm2", {"containers": [{"name": "engine"}], "volumes": [{"name": "x"}]}, ""),
    ],
)
def test_a_mistyped_container_is_named_as_such(model: str, patch: dict[str, Any], sentence: str) -> None:
    made = plan_of({"model": model, "podTemplate": {"spec": patch}})
    if not sentence:
        assert made.desired is not None
        return
    assert condition(made)["reason"] == "InvalidSpec"
    assert condition(made)["message"] == f"podTemplate.spec.{sentence}"


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


def test_pods_are_spread_over_hosts_where_there_is_a_choice() -> None:
    made = plan_of({"replicas": 2})
    (spread,) = pod_spec(made)["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    labels = wanted(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


# -- the other objects -------------------------------------------------------------------------------------


def test_by_default_a_rollout_deletes_before_it_creates() -> None:
    strategy = wanted(plan_of(), "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    asked = plan_of({"rollout": {"maxSurge": "25%", "maxUnavailable": 0}})
    strategy = wanted(asked, "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        ({}, 1),
        ({"replicas": 0}, 0),
        ({"replicas": 3}, 3),
        ({"replicas": 1, "autoscaling": {"min": 2, "max": 4}}, 2),
        ({"replicas": 3, "autoscaling": {"min": 2, "max": 4}}, 3),
        ({"replicas": 9, "autoscaling": {"min": 2, "max": 4}}, 4),
    ],
)
def test_replicas_are_what_is_asked_for_within_the_autoscalers_limits(
    spec: dict[str, Any], replicas: int
) -> None:
    made = plan_of(spec)
    assert wanted(made, "Deployment")["spec"]["replicas"] == replicas
    assert made.status["desiredReplicas"] == replicas


@pytest.mark.parametrize(
    ("spec", "running", "replicas"),
    [
        ({}, None, 1),
        ({}, 3, 3),
        ({}, 0, 0),
        ({"autoscaling": {"min": 2, "max": 4}}, None, 2),
        ({"autoscaling": {"min": 2, "max": 4}}, 3, 3),
    ],
)
def test_where_replicas_are_left_out_what_runs_stays_and_is_written_where_scale_reads_it(
    spec: dict[str, Any], running: int | None, replicas: int
) -> None:
    """An apply that takes `replicas` out of a manifest, for an autoscaler to have, must not cost pods."""
    made = plan_of(spec, children={} if running is None else deployment(running))
    assert wanted(made, "Deployment")["spec"]["replicas"] == made.replicas == replicas
    assert plan_of({**spec, "replicas": 3}, children=deployment(1)).replicas is None, "it is there"


OURS = Target("apps", "Deployment", "team", "qwen-engine")


@pytest.mark.parametrize(
    ("acted", "autoscaled", "is_theirs"),
    [
        (True, frozenset({OURS}), True),
        (True, None, True),  # who knows
        (True, frozenset(), False),  # it has gone
        (True, frozenset({OURS._replace(name="other-engine")}), False),
        (False, frozenset({OURS}), False),  # nobody else has set replicas: without us they would be 1
    ],
)
def test_replicas_are_left_alone_while_an_autoscaler_scales_the_deployment_itself(
    acted: bool, autoscaled: frozenset[Target] | None, is_theirs: bool
) -> None:
    children = deployment(5)
    (child,) = children.values()
    entry = {"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    child["metadata"]["managedFields"] = [entry | {"subresource": "scale"}] if acted else []
    made = plan_of({"replicas": 3}, children=children, autoscaled=autoscaled)
    assert wanted(made, "Deployment")["spec"].get("replicas") == (None if is_theirs else 3)
    assert made.status["desiredReplicas"] == (5 if is_theirs else 3)


AUTOSCALING = {"replicas": 3, "autoscaling": {"min": 2, "max": 4}}


def after(reports: list[ScalingReport | None]) -> tuple[dict[str, Any], list[str]]:
    """The condition Autoscaling once the autoscaler has said all that, and its Events on the way."""
    status: dict[str, Any] = {}
    told: list[str] = []
    for report in reports:
        seen = observed(AUTOSCALING, children=deployment(3), scaling=report)
        seen.service["status"] = status
        made = plan(seen, SETTINGS)
        status = made.status
        told += [f"{one.reason}: {one.message}" for one in made.events if "utoscal" in one.message]
        told += [f"{one.reason}: {one.message}" for one in made.events if "in flight" in one.message]
    return condition(made, "Autoscaling"), told


UP = ScalingReport(True, "2 to 3 replicas: 90 requests in flight, targetConcurrency 32")
ASIDE = ScalingReport(False, "a HorizontalPodAutoscaler targets it")
IDLE = ScalingReport(True)


@pytest.mark.parametrize(
    ("reports", "reason", "message", "events"),
    [
        ([None], "AutoscalingActive", "2 to 4 replicas, 32 requests in flight each", []),
        ([None, UP], "AutoscalingActive", UP.message, [f"AutoscalingActive: {UP.message}"]),
        ([UP, UP, IDLE, None], "AutoscalingActive", UP.message, [f"AutoscalingActive: {UP.message}"]),
        ([None, ASIDE, None], "SteppedAside", ASIDE.message, [f"SteppedAside: {ASIDE.message}"]),
        (
            [ASIDE, IDLE],
            "AutoscalingActive",
            "2 to 4 replicas, 32 requests in flight each",
            [
                f"SteppedAside: {ASIDE.message}",
                "AutoscalingActive: 2 to 4 replicas, 32 requests in flight each",
            ],
        ),
    ],
)
def test_what_the_autoscaler_does_is_a_condition_and_each_decision_an_event(
    reports: list[ScalingReport | None], reason: str, message: str, events: list[str]
) -> None:
    found, told = after(reports)
    assert (found["reason"], found["message"]) == (reason, message)
    assert found["status"] == ("True" if reason == "AutoscalingActive" else "False")
    assert told == events


def test_a_service_without_autoscaling_says_nothing_of_it() -> None:
    assert "Autoscaling" not in [one["type"] for one in plan_of().status["conditions"]]


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
    """A new field must come with a case: its JSON name stands in this file."""
    text = Path(__file__).read_text(encoding="utf-8")

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
