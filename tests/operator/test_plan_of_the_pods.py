"""plan(): what the spec and the settings do to the pods."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_builders import (
    GPU,
    SETTINGS,
    container,
    download,
    environment,
    plan_of,
    pod_spec,
    volume,
    wanted,
)


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


def test_pods_are_spread_over_hosts_where_there_is_a_choice() -> None:
    made = plan_of({"replicas": 2})
    (spread,) = pod_spec(made)["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    labels = wanted(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
