"""The engine: a model's tokens in, tokens out.

    LLM             offline use: `LLM("smollm2").generate(["Once upon a time"], max_tokens=20)`
    AsyncEngine     for servers: streams, aborts, a core process of its own
    SamplingParams  how to pick tokens, and when to stop
    EngineConfig    every setting
    errors          what can go wrong, as types

Names are imported on first use, so that `import leadline.engine` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.engine import errors as errors
    from leadline.engine.client.async_engine import AsyncEngine as AsyncEngine
    from leadline.engine.config import EngineConfig as EngineConfig
    from leadline.engine.llm import LLM as LLM
    from leadline.engine.sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "errors"]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "client.async_engine",
    "EngineConfig": "config",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("leadline.engine.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"leadline.engine.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
