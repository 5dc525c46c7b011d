"""Prompts of requests: chat templates, tokenization; off the event loop when they are long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from leadline.engine.async_engine import AsyncEngine
from leadline.protocol.text.prompts import (
    PromptInput,
    PromptRequest,
    prompt_inputs,
    prompt_token_ids,
    tokens_kept,
)

__all__ = ["encode", "prompts_of"]

_INLINE_CHARACTERS = 16_384
"""Shorter texts tokenize in about a millisecond, less than the hop to a thread is worth."""
_INLINE_MESSAGES = 64


async def prompts_of(body: PromptRequest, engine: AsyncEngine) -> list[PromptInput]:
    """The prompts of a request; a chat goes through the model's template. Raises RequestError, with the
    template's own complaint, and for a `suffix` that the model has no form for."""
    if len(getattr(body, "messages", None) or ()) <= _INLINE_MESSAGES and not getattr(body, "suffix", None):
        prompts = prompt_inputs(body, engine.renderer, engine.tokenizer)
    else:
        prompts = await asyncio.to_thread(prompt_inputs, body, engine.renderer, engine.tokenizer)
    if (kept := tokens_kept(body, engine.max_model_len)) is None:
        return prompts
    return [
        replace(prompt, content=(await encode(replace(prompt, resume_token_ids=()), engine))[-kept:])
        for prompt in prompts
    ]


async def encode(prompt: PromptInput, engine: AsyncEngine) -> list[int]:
    """Token ids of a prompt, without asking whether they fit the model."""
    if len(prompt.content) <= _INLINE_CHARACTERS:
        return prompt_token_ids(prompt, engine.tokenizer)
    return await asyncio.to_thread(prompt_token_ids, prompt, engine.tokenizer)
