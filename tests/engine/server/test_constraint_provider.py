"""Constraint providers: the example as a user registers it, over a core that counts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.hub import resolve_model
from leadline.engine.sampling_params import StructuredSpec
from leadline.engine.server.api.turn import prepare_turn
from leadline.protocol.anthropic.request import MessagesRequest
from leadline.protocol.openai import ChatCompletionRequest
from leadline.protocol.responses import ResponsesRequest

EXAMPLES = Path(__file__).parents[3] / "examples" / "policies"
PLAIN = StructuredSpec("regex", r"[\x20-\x7e\n]{1,1600}")
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Name a river."}]}
TOOL = {"name": "rain", "parameters": {"type": "object", "properties": {}}, "strict": True}


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[leadline.constraint_providers]\n"
        "plain-text = plain_text:PlainText\n"
        "incomplete = collections:OrderedDict\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
async def engine(registered: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = str(resolve_model("smollm2", progress=False).path)
    config = EngineConfig(model=path, constraint_provider="plain-text")
    engine = await AsyncEngine.start(config, factory="scripted_core:build")
    try:
        yield engine
    finally:
        await engine.stop()


async def constraint(engine: AsyncEngine, body: ChatCompletionRequest) -> StructuredSpec | None:
    return (await prepare_turn(body, engine)).sampling.structured


async def test_a_provider_constrains_the_answers_of_every_api(engine: AsyncEngine) -> None:
    chat = msgspec.convert(ASK, ChatCompletionRequest)
    messages = msgspec.convert({**ASK, "max_tokens": 8}, MessagesRequest)
    response = msgspec.convert({"model": "m", "input": "Name a river."}, ResponsesRequest)
    for body in (chat, messages.chat(), response.chat()):
        assert await constraint(engine, body) == PLAIN
    # Requests that the provider leaves alone keep what they ask for.
    strict = msgspec.convert(
        {**ASK, "tools": [{"type": "function", "function": TOOL}]}, ChatCompletionRequest
    )
    kept = await constraint(engine, strict)
    assert kept is not None
    assert (kept.kind, kept.param) == ("lark", "tools")
    own = msgspec.convert({**ASK, "regex": "[a-z]+"}, ChatCompletionRequest)
    assert await constraint(engine, own) == StructuredSpec("regex", "[a-z]+", param="regex")


async def test_a_provider_takes_the_place_of_what_the_request_asks_for(engine: AsyncEngine) -> None:
    class Yes:
        def constrain(self, request: ChatCompletionRequest) -> StructuredSpec:
            return StructuredSpec("regex", "yes")

    engine.constraints = Yes()
    strict = msgspec.convert(
        {**ASK, "tools": [{"type": "function", "function": TOOL}]}, ChatCompletionRequest
    )
    turn = await prepare_turn(strict, engine)
    assert turn.sampling.structured == StructuredSpec("regex", "yes")
    assert turn.may_call


@pytest.mark.usefixtures("registered")
def test_a_provider_that_cannot_be_used_stops_the_engine_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"constraint_provider 'plain' is unknown; known: incomplete, plain-text"
    ):
        AsyncEngine(EngineConfig(model="m", constraint_provider="plain"))
    with pytest.raises(ConfigError, match="lacks a method of ConstraintProvider"):
        AsyncEngine(EngineConfig(model="m", constraint_provider="incomplete"))
