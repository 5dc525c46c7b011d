"""The tools that real clients and MCP servers send: every schema is accepted, and it holds."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.frontend.tool_formats import format_named
from leadline.engine.frontend.tool_schema import calls_in_text, plan_tools
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.text.tokenizer import Tokenizer
from recorded_tools import loaded

TOOLS = loaded()
EACH = [
    pytest.param(tool["schema"], id=f"{client}-{tool['name']}")
    for client, tools in TOOLS.items()
    for tool in tools
]
END = ('"', "}", "]", ",", '"}', '"]', "}}", ":", '":')
"""Texts that bring an object to its end, where they may come."""


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def functions(tools: list[dict[str, Any]], *, strict: bool) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": tool["name"], "parameters": tool["schema"], "strict": strict},
        }
        for tool in tools
    ]


def drawn(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredSpec, seed: int) -> Any:
    """A value that the grammar allows, as a model that picks at random would write it."""
    matcher, mask, pick = (
        compiler.matcher(spec),
        np.zeros(compiler.mask_words, dtype=np.int32),
        random.Random(seed),
    )
    ends = {token_id for text in END if (token_id := tokenizer.token_id(text)) is not None}
    ids: list[int] = []
    while not matcher.finished:
        assert len(ids) < 2000, tokenizer.decode(ids)
        matcher.mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ending = [token_id for token_id in allowed if token_id in ends]
        printable = [
            i for i in pick.sample(allowed, min(40, len(allowed))) if tokenizer.token_bytes(i).strip()
        ]
        token_id = pick.choice(
            ending if ending and (pick.random() < 0.6 or not printable) else printable or allowed
        )
        if token_id in tokenizer.eos_token_ids:
            break
        assert matcher.accept(token_id)
        ids.append(token_id)
    return json.loads(tokenizer.decode(ids), parse_float=finite)


def finite(text: str) -> float:
    """A number of JSON may have any size; jsonschema_rs takes those that a double holds."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredSpec, value: Any) -> bool:
    matcher = compiler.matcher(spec)
    ids = tokenizer.encode(json.dumps(value), add_special_tokens=False)
    return all(matcher.accept(token_id) for token_id in ids) and matcher.accept(tokenizer.eos_token_ids[0])


def spoiled(value: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Variants of a value: other types, fields left out, one too many."""
    found: list[dict[str, Any]] = []
    names = [
        *schema.get("properties", {}),
        *(name for name in value if name not in schema.get("properties", {})),
    ]
    for name in names:
        found.append({key: item for key, item in value.items() if key != name})
        for other in ("zz", [None]):
            # In the schema's order, in which the grammar expects them.
            changed = {**value, name: other}
            found.append({key: changed[key] for key in names if key in changed})
    return [*found, {**value, "zz": 1}]


@pytest.mark.parametrize("schema", EACH)
def test_a_recorded_schema_is_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    spec = StructuredSpec("json_schema", json.dumps({"type": "object", **schema}), param="tools")
    judge = jsonschema_rs.validator_for(schema)
    value = drawn(compiler, tokenizer, spec, seed=1)
    assert judge.is_valid(value), value
    refused = [wrong for wrong in spoiled(value, schema) if not judge.is_valid(wrong)]
    for wrong in refused:
        assert not takes(compiler, tokenizer, spec, wrong), wrong
    assert refused or not schema.get("properties"), "nothing was wrong"


@pytest.mark.parametrize("client", TOOLS)
def test_all_tools_of_a_client_compile_together(
    compiler: GrammarCompiler, tokenizer: Tokenizer, client: str
) -> None:
    forced = plan_tools(functions(TOOLS[client], strict=False), "required")
    assert forced.constraint is not None
    compiler.validate(forced.constraint)
    strict = plan_tools(functions(TOOLS[client], strict=True))
    for name in ("hermes", "qwen3_coder"):
        spec = calls_in_text(strict, format_named(name), tokenizer)
        assert spec is not None
        compiler.validate(spec)
