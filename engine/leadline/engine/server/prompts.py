"""Prompts of requests: which model, chat templates, tokenization; off the event loop when they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from leadline.engine.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.server.http import ApiError
from leadline.protocol.openai.chat import ChatMessage, Tool

__all__ = ["check_model", "check_token_ids", "encode", "render_chat"]

_INLINE_CHARACTERS = 16_384
"""Shorter texts tokenize in about a millisecond, less than the hop to a thread is worth."""
_INLINE_MESSAGES = 64


def check_model(name: str | None, engine: AsyncEngine) -> None:
    if name is not None and name != engine.served_name:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {engine.served_name!r}",
            type="not_found_error",
            param="model",
            code="model_not_found",
        )


async def render_chat(
    messages: Sequence[ChatMessage],
    engine: AsyncEngine,
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """A conversation through the model's chat template. Raises RequestError with the template's own
    complaint."""
    plain = msgspec.to_builtins(list(messages))
    plain_tools = msgspec.to_builtins(list(tools)) if tools else None
    continues = bool(continue_final_message)

    def render() -> str:
        return engine.renderer.render(
            plain,
            tools=plain_tools,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=template_kwargs,
        )

    return render() if len(plain) <= _INLINE_MESSAGES else await asyncio.to_thread(render)


async def encode(text: str, engine: AsyncEngine, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, without asking whether they fit the model."""
    if len(text) <= _INLINE_CHARACTERS:
        return engine.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(engine.tokenizer.encode, text, add_special_tokens)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} holds the token id {token}, but the vocabulary ends at {vocab_size - 1}",
                param=param,
            )
