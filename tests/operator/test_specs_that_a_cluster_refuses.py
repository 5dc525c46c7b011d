"""The API server refuses what an InferenceService cannot be, with a sentence. No operator runs."""

from __future__ import annotations

import pytest
from cluster_tools import Cluster, KubectlError, service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BAD = {
    "a model of no known form": ({"model": "qwen"}, "model must be hf://ORG/NAME"),
    "replicas beside autoscaling": (
        {"replicas": 2, "autoscaling": {"max": 3}},
        "replicas and autoscaling exclude each other",
    ),
    "min above max": ({"autoscaling": {"min": 4, "max": 3}}, "must not be greater than autoscaling.max"),
    "a CPU has no ranks": ({"tensorParallel": 2, "accelerator": {"type": "cpu"}}, "tensorParallel must be 1"),
    "ranks of a model that embeds": ({"tensorParallel": 2, "task": "embed"}, "with task embed or rerank"),
    "a rollout that cannot move": ({"rollout": {"maxUnavailable": 0}}, "must not both be 0"),
    "a cache of no size and no claim": ({"cache": {}}, "cache takes either claimName"),
    "a cache of both": ({"cache": {"claimName": "c", "size": "1Gi"}}, "cache takes either claimName"),
    "a class for a claim that exists": (
        {"cache": {"claimName": "c", "storageClass": "fast"}},
        "cache.storageClass is of a claim that is made",
    ),
    "no quantity": ({"cache": {"size": "10 GB"}}, "such as 100Gi"),
    "an argument of the operator's": (
        {"engine": {"extraArgs": ["--port=1"]}},
        "must not set what the operator sets",
    ),
    "a block size there is not": ({"engine": {"blockSize": 17}}, "supported values"),
    "a name with a comma": ({"aliases": ["a,b"]}, "no comma"),
    "an alias twice": ({"aliases": ["a", "a"]}, "Duplicate value"),
    "an unknown field": ({"tensorParalel": 2}, "unknown field"),
    "a prompt of two lines": ({"engine": {"warmupPrompts": ["a\nb"]}}, "one line"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_a_sentence(namespace: Cluster, case: str) -> None:
    spec, sentence = BAD[case]
    with pytest.raises(KubectlError, match=sentence):
        namespace.apply(service("bad", **spec))


@pytest.mark.parametrize("name", ["a" * 53, "dotted.name", "1digit"])
def test_a_name_that_cannot_be_a_services_is_refused(namespace: Cluster, name: str) -> None:
    with pytest.raises(KubectlError, match=r"metadata.name must be at most 52"):
        namespace.apply(service(name))


def test_what_cannot_change_is_refused_and_what_can_is_not(namespace: Cluster) -> None:
    cache = {"size": "2Gi", "storageClass": "standard"}
    namespace.apply(service("fixed", cache=cache))
    for change, sentence in (
        ({"storageClass": "other"}, "storageClass cannot change"),
        ({"accessMode": "ReadWriteMany"}, "accessMode cannot change"),
        ({"size": "1Gi"}, "can only grow"),
    ):
        with pytest.raises(KubectlError, match=sentence):
            namespace.apply(service("fixed", cache={**cache, **change}))
    namespace.apply(service("fixed", cache={**cache, "size": "3Gi"}, model="hf://Qwen/Qwen3-8B"))
    namespace.apply(service("fixed", cache={"claimName": "shared"}))
    namespace.apply(service("fixed", cache={"size": "1Gi"}))
