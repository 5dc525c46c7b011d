"""plan(): the claim that holds the model's files, and what happens to it when `cache` changes."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import SETTINGS, condition, observed, plan_of, pod_spec, volume, wanted

from leadline.operator.planning.plan import plan


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
