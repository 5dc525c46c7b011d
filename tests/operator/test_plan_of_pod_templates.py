"""plan(): the patch `podTemplate`."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import GPU, condition, deployment, plan_of, wanted


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
