"""Every field of vLLM's request classes is honoured, refused by name, or named in a header: none is ignored.

The names are those of vLLM 0.33. Each has a value here that asks for something.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadline.protocol.anthropic.request import MessagesRequest
from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest, InvalidBody, decode_body
from leadline.protocol.openai.service import DetokenizeRequest, TokenizeRequest
from leadline.protocol.responses import ResponsesRequest

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_object"}

SAMPLING: dict[str, Any] = {
    "model": "m",
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "n": 2,
    "seed": 1,
    "stop": ["x"],
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "u",
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "prompt_logprobs": 1,
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "add_special_tokens": True,
    "response_format": SCHEMA,
    "structured_outputs": {"regex": "x"},
    "priority": 1,
    "session_id": "s",
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "cache_salt": "s",
    "max_tokens": 5,
    "echo": True,
}
REFUSED: dict[str, Any] = {
    "use_beam_search": True,
    "logprob_token_ids": [5],
    "watermarking": True,
    "kv_transfer_params": {"do_remote_decode": True},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"x": 1},
    "repetition_detection": {"max_pattern_size": 3},
}
SKIPPED: dict[str, Any] = {
    "length_penalty": 0.5,
    "spaces_between_special_tokens": False,
    "request_id": "r",
    "return_weight_versions": True,
    "routed_experts_prompt_start": 3,
    "return_token_offsets": True,
    "mm_payload": "hashes",
    "return_mm_kwargs": True,
    "stream_interval": 4,
}
MULTIMODAL: dict[str, Any] = {"media_io_kwargs": {"x": {}}, "mm_processor_kwargs": {"x": 1}}


def parts(of: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: of[name] for name in names}


BOTH_RENDER = parts(SKIPPED, "mm_payload", "return_mm_kwargs")
TRANSFER = parts(REFUSED, "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "watermarking")
KINDS: dict[type, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # kind: what it must have, and fields that are honoured, refused and skipped
    ChatCompletionRequest: (
        {"messages": HI},
        SAMPLING
        | {
            "messages": HI,
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 5,
            "stream_options": {"include_usage": True},
            "tools": [WEATHER],
            "tool_choice": "none",
            "reasoning_effort": "low",
            "thinking_token_budget": 5,
            "include_reasoning": False,
            "parallel_tool_calls": False,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"x": 1},
        },
        REFUSED | {"documents": [{"x": "y"}], "chat_template": "{{ x }}"},
        SKIPPED | MULTIMODAL | {"return_prompt_text": True},
    ),
    CompletionRequest: (
        {"prompt": "Hi"},
        SAMPLING | {"prompt": "Ho", "logprobs": 2, "suffix": "x", "stream_options": {"include_usage": True}},
        REFUSED | {"prompt_embeds": "x", "thinking_token_budget": 5},
        SKIPPED,
    ),
    ResponsesRequest: (
        {"input": "Hi"},
        parts(
            SAMPLING,
            "model",
            "logit_bias",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "user",
            "seed",
        )
        | parts(SAMPLING, "skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "stop")
        | parts(SAMPLING, "frequency_penalty", "session_id", "priority", "cache_salt", "structured_outputs")
        | parts(SAMPLING, "repetition_penalty", "stop_token_ids", "ignore_eos")
        | {
            "input": "Ho",
            "include": ["message.output_text.logprobs"],
            "instructions": "x",
            "max_output_tokens": 5,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "include_reasoning": False,
            "service_tier": "auto",
            "store": False,
            "text": {"format": {"type": "json_object"}},
            "tool_choice": "none",
            "tools": [{"type": "function", "name": "f"}],
            "top_logprobs": 2,
            "prompt_cache_key": "k",
            "safety_identifier": "u",
            "chat_template_kwargs": {"x": 1},
        },
        TRANSFER
        | {
            "background": True,
            "previous_response_id": "resp_1",  # a gateway that stores responses replaces it
            "prompt": {"id": "x"},
            "previous_input_messages": [{}],
        },
        MULTIMODAL
        | BOTH_RENDER
        | parts(SKIPPED, "spaces_between_special_tokens", "request_id")
        | {
            "max_tool_calls": 3,
            "truncation": "auto",
            "prompt_cache_options": {"mode": "explicit"},
            "prompt_cache_retention": "24h",
            "enable_response_messages": True,
        },
    ),
    MessagesRequest: (
        {"messages": HI, "max_tokens": 5},
        parts(SAMPLING, "model", "stream", "temperature", "top_k", "top_p", "cache_salt")
        | {
            "messages": HI,
            "max_tokens": 6,
            "metadata": {"user_id": "u"},
            "output_config": {"effort": "low"},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
            "system": "x",
            "tool_choice": {"type": "none"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "chat_template_kwargs": {"x": 1},
        },
        TRANSFER,
        BOTH_RENDER,
    ),
    TokenizeRequest: (
        {"messages": HI},
        {
            "messages": HI,
            "model": "m",
            "add_special_tokens": True,
            "return_token_strs": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"x": 1},
            "tools": [WEATHER],
        },
        {"chat_template": "{{ x }}"},
        MULTIMODAL,
    ),
    DetokenizeRequest: ({"tokens": [5]}, {"tokens": [5], "model": "m"}, {}, {}),
}
OF_CHATS_ELSEWHERE = {
    "n": 2,
    "response_format": SCHEMA,
    "max_completion_tokens": 5,
    "reasoning_effort": "low",
    "logprobs": True,
    "functions": [{}],
    "guided_json": {},
    "guided_regex": "x",
    "guided_choice": ["x"],
    "guided_grammar": "x",
    "truncate_prompt_tokens": 5,
}


def rows(which: int) -> list[Any]:
    return [
        pytest.param(kind, table[0], name, value, id=f"{kind.__name__} {name}")
        for kind, table in KINDS.items()
        for name, value in table[which].items()
    ]


def read(kind: type, base: dict[str, Any], name: str, value: Any) -> tuple[Any, Any]:
    """The request, and the chat that it stands for."""
    request: Any = decode_body(json.dumps(base | {name: value}).encode(), kind)
    return request, request.chat() if hasattr(request, "chat") else request


def skipped(request: Any, chat: Any) -> list[str]:
    """What the header names."""
    return [*getattr(chat, "skipped", ()), *getattr(request, "not_honoured", ()), *request.skipped_fields]


@pytest.mark.parametrize(("kind", "base", "name", "value"), rows(1))
def test_a_field_is_honoured(kind: type, base: dict[str, Any], name: str, value: Any) -> None:
    request, chat = read(kind, base, name, value)
    assert getattr(request, name) is not None
    if kind is not DetokenizeRequest:
        assert skipped(request, chat) == []


@pytest.mark.parametrize(("kind", "base", "name", "value"), rows(2))
def test_a_field_is_refused_by_name(kind: type, base: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(InvalidBody, match=f"{name} is not supported; ") as caught:
        read(kind, base, name, value)
    assert caught.value.param == name


@pytest.mark.parametrize(("kind", "base", "name", "value"), rows(3))
def test_a_field_is_named_as_skipped(kind: type, base: dict[str, Any], name: str, value: Any) -> None:
    request, chat = read(kind, base, name, value)
    assert name in skipped(request, chat)
    default = {"spaces_between_special_tokens": True, "length_penalty": 1.0, "truncation": "disabled"}
    assert name not in skipped(*read(kind, base, name, default.get(name)))


@pytest.mark.parametrize("kind", [MessagesRequest, ResponsesRequest])
@pytest.mark.parametrize(("name", "value"), OF_CHATS_ELSEWHERE.items())
def test_a_chats_field_is_refused_where_it_has_another_name(kind: type, name: str, value: Any) -> None:
    with pytest.raises(InvalidBody, match=f"{name} is not supported; ") as caught:
        read(kind, KINDS[kind][0], name, value)
    assert caught.value.param == name


def test_responses_and_messages_have_their_own_names_of_limits_and_stops() -> None:
    for kind, name, value in ((ResponsesRequest, "max_tokens", 5), (MessagesRequest, "stop", ["x"])):
        with pytest.raises(InvalidBody, match=r"use (max_output_tokens|stop_sequences)"):
            read(kind, KINDS[kind][0], name, value)
