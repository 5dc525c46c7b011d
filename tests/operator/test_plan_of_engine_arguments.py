"""plan(): the arguments of the engine, by the field of the spec that sets each."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import container, plan_of

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
    "task": ({"task": "embed"}, "--task=embed"),
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


def test_a_task_left_open_leaves_the_arguments_of_running_pods_alone() -> None:
    assert not [one for one in container(plan_of({}))["args"] if one.startswith("--task")]


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
