"""The command lines of N engines of one model, and the share of this machine that each of them gets.

The model's name is resolved once, here; the engines are given the folder. What they serve it as, and the
namespace of their prefix chains (the folder's name and a digest of its contents), is therefore the same for
all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadline.cli.options import engine_config
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.system.cpu_limit import usable_cores

__all__ = ["EngineSettings", "given_options", "share_gpus", "visible_gpus"]


@dataclass(slots=True, frozen=True)
class EngineSettings:
    """Use `EngineSettings.of`."""

    folder: Path
    served_name: str
    options: Mapping[str, Any]
    """EngineConfig fields that were given, but for the model and its name."""
    extra: tuple[str, ...] = field(default=())
    """Further arguments of `leadline serve`."""

    @classmethod
    def of(cls, model: str, args: argparse.Namespace, extra: Sequence[str] = ()) -> EngineSettings:
        """Checks the options and resolves the model, which may take a download or a conversion.

        Raises ConfigError, ModelNotFound, ModelUnreachable, Unauthorized.
        """
        config = engine_config(model, args)
        from leadline.engine.hub import resolve_model

        local = resolve_model(model, download_dir=config.download_dir)
        options = given_options(args)
        served_name = options.pop("served_name", None) or local.model_id
        options.pop("download_dir", None)
        return cls(local.path, served_name, options, tuple(extra))

    def commands(self, ports: Sequence[int], log_level: str) -> list[tuple[list[str], dict[str, str]]]:
        """(command, additions to the environment) for each engine, one a port of 127.0.0.1."""
        options = dict(self.options)
        environments: list[dict[str, str]] = [{} for _ in ports]
        gpus = [] if options.get("device") == "cpu" else visible_gpus(os.environ)
        if gpus:
            shares, sharers = share_gpus(gpus, len(ports), options.get("tensor_parallel", 1))
            if sharers > 1:
                utilization = EngineConfig(model="").gpu_memory_utilization / sharers
                options.setdefault("gpu_memory_utilization", round(utilization, 3))
            for environment, share in zip(environments, shares, strict=True):
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        else:
            options.setdefault("cpu_threads", max(1, usable_cores() // len(ports)))
        return [
            (
                [
                    *(sys.executable, "-m", "leadline.cli.main", "serve", str(self.folder)),
                    *("--host=127.0.0.1", f"--port={port}", f"--served-name={self.served_name}"),
                    *(f"--log-level={log_level}", *_arguments(options), *self.extra),
                ],
                environment,
            )
            for port, environment in zip(ports, environments, strict=True)
        ]


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options on a command line: EngineConfig field → value."""
    names = {config_field.name for config_field in dataclasses.fields(EngineConfig)} - {"model"}
    return {name: value for name, value in vars(args).items() if name in names}


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as `leadline serve` takes them."""
    arguments = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            arguments.append(f"--{option}=" + ",".join(f"{key}={weight}" for key, weight in value.items()))
        elif value is not None:
            arguments.append(f"--{option}={value}")
    return arguments


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: those in the environment, else all that nvidia-smi lists."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def share_gpus(gpus: Sequence[str], replicas: int, tensor_parallel: int) -> tuple[list[list[str]], int]:
    """(the GPUs of each replica, how many replicas share a GPU at most).

    Raises ConfigError when tensor-parallel replicas would have to share.
    """
    if replicas * tensor_parallel <= len(gpus):
        starts = range(0, replicas * tensor_parallel, tensor_parallel)
        return [list(gpus[start : start + tensor_parallel]) for start in starts], 1
    if tensor_parallel > 1:
        raise ConfigError(
            f"{replicas} replicas with tensor_parallel {tensor_parallel} need {replicas * tensor_parallel} "
            f"GPUs; there are {len(gpus)}"
        )
    return [[gpus[number % len(gpus)]] for number in range(replicas)], -(-replicas // len(gpus))
