"""Command-line options made from the fields of EngineConfig, and the config made from the options.

The dataclass stays the only list of settings: its types say how to parse, its defaults are the options'
defaults, and the strings below its fields are the help texts (read from its source; `_EXTRA_HELP` fills in
where there is none).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

from leadline.engine import config as config_module
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError

__all__ = ["add_engine_options", "engine_config", "lines_of", "text_of"]

_SKIPPED = {"model"}
"""Given as a positional argument."""

_EXTRA_HELP = {
    "served_name": "Model name that clients use; the model argument as given when left out.",
    "download_dir": "Folder for downloaded and converted models; the caches' own places when left out.",
    "seed": "Seed of the weights that --load-format dummy makes up; requests bring their own.",
    "tensor_parallel": "GPUs to shard the model over.",
    "gpu_memory_utilization": "Share of GPU memory that weights, activations and KV cache may use together.",
    "cpu_kv_bytes": "Bytes of KV cache on CPU.",
    "prefix_caching": "Reuse the KV blocks of prompts that begin alike.",
    "eviction_policy": "Which cached blocks go first: lru, length-aware, or the name of an entry point.",
    "max_queued_requests": "Requests that may wait; more are refused with 429.",
    "scheduling_policy": "Order of admission: weighted, or the name of an entry point.",
    "class_weights": "Shares of the token budget, as interactive=4,batch=1.",
    "enforce_eager": "Run every step without CUDA graphs.",
    "max_logprobs": "Most alternatives a request may ask for per token.",
    "max_n": "Most choices a request may ask for.",
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per EngineConfig field (`max_model_len` → `--max-model-len`)."""
    group = parser.add_argument_group("engine settings")
    docs = _field_docs()
    for field in dataclasses.fields(EngineConfig):
        if field.name in _SKIPPED:
            continue
        option = "--" + field.name.replace("_", "-")
        text = " ".join(docs.get(field.name, _EXTRA_HELP.get(field.name, "")).split())
        default = _default(field)
        shown = "" if default in (None, False) else f" (default: {_show(default)})"
        common: dict[str, Any] = {"dest": field.name, "help": (text + shown).replace("%", "%%")}
        kind = str(field.type)
        if kind.startswith("bool"):
            parser_kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            parser_kind = {
                "type": _PARSERS[kind.removesuffix(" | None")],
                "metavar": _METAVARS[kind.removesuffix(" | None")],
            }
        group.add_argument(option, default=argparse.SUPPRESS, **parser_kind, **common)


def engine_config(model: str, args: argparse.Namespace) -> EngineConfig:
    """The config of the options given; raises ConfigError for values that cannot work."""
    names = {field.name for field in dataclasses.fields(EngineConfig)} - _SKIPPED
    given = {name: value for name, value in vars(args).items() if name in names}
    return EngineConfig(model=model, **given).validate()


def text_of(path: Path) -> str:
    """Of a file; raises ConfigError for what is no text, OSError for what cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from None


def lines_of(path: Path | None) -> tuple[str, ...]:
    """The lines of a file that are not blank; none where there is no file."""
    if path is None:
        return ()
    return tuple(line.strip() for line in text_of(path).splitlines() if line.strip())


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _show(value: Any) -> str:
    return (
        ",".join(f"{key}={weight:g}" for key, weight in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def _weights(text: str) -> dict[str, float]:
    weights = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected NAME=NUMBER,..., got {text!r}") from None
    return weights


_PARSERS: dict[str, Any] = {"str": str, "int": int, "float": float, "dict[str, float]": _weights}
_METAVARS = {"str": "NAME", "int": "N", "float": "X", "dict[str, float]": "NAME=X,..."}


@functools.cache
def _field_docs() -> dict[str, str]:
    """Field name → the string literal that follows it in the class body."""
    tree = ast.parse(inspect.getsource(config_module))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == EngineConfig.__name__:
            docs = {}
            for this, following in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(this, ast.AnnAssign)
                    and isinstance(this.target, ast.Name)
                    and isinstance(following, ast.Expr)
                    and isinstance(following.value, ast.Constant)
                ):
                    docs[this.target.id] = str(following.value.value)
            return docs
    return {}
