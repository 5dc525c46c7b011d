"""Requests of the wire → the fields of SamplingParams that they give. Null and absent both mean "not given":
`RequestBuilder.sampling_params` fills the gap with what the model's authors recommend.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.config import EngineConfig
from leadline.engine.errors import RequestError
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.common import GenerationRequest
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.text.infill import infill_ends
from leadline.protocol.text.prompts import (
    PromptInput,
    PromptRequest,
    cut,
    prompt_inputs,
    prompt_token_ids,
    tokens_kept,
    tools_shown,
)
from leadline.protocol.text.reasoning_effort import EFFORT
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = [
    "chat_sampling",
    "check_sequences",
    "completion_sampling",
    "encode",
    "extras",
    "in_words_of_chat",
    "in_words_of_completions",
    "in_words_of_messages",
    "prompts_of",
    "thinking_budget",
]


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
        replace(prompt, content=cut(body, await encode(replace(prompt, resume_token_ids=()), engine), kept))
        for prompt in prompts
    ]


async def encode(prompt: PromptInput, engine: AsyncEngine) -> list[int]:
    """Token ids of a prompt, without asking whether they fit the model."""
    if len(prompt.content) <= _INLINE_CHARACTERS:
        return prompt_token_ids(prompt, engine.tokenizer)
    return await asyncio.to_thread(prompt_token_ids, prompt, engine.tokenizer)


_EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}
"""Tokens of a thought, for models whose template reads no effort."""

_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "n",
)


def chat_sampling(request: ChatCompletionRequest, structured: StructuredSpec | None) -> dict[str, Any]:
    """Fields of SamplingParams that the request gives. `structured` is what its tools ask for, if
    anything."""
    given = _common(request, structured)
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    if request.prompt_logprobs is not None and not request.resume_token_ids:
        given["prompt_logprobs"] = request.prompt_logprobs
    return given


def thinking_budget(request: ChatCompletionRequest, engine: AsyncEngine) -> int | None:
    """Tokens that a thought may have: the request's own limit; else that of its effort, where the template
    does not read the effort itself, within the server's default. None: any number."""
    if request.thinking_budget is not None:
        # Larger numbers mean the same and may not fit the message to the core.
        return None if request.thinking_budget < 0 else min(request.thinking_budget, engine.max_model_len)
    effort, default = request.reasoning_effort, engine.config.thinking_budget
    if effort is None:
        return default
    shown = tools_shown(request.tools, request.tool_choice)
    if EFFORT in engine.renderer.effort_variables(effort, tools=bool(shown)):
        return default
    return min((x for x in (_EFFORT_BUDGETS.get(effort), default) if x is not None), default=None)


def in_words_of_chat(error: RequestError) -> RequestError:
    """The engine's refusal with the field's name in a chat."""
    return _renamed(error, {"prompt": "messages", "logprobs": "top_logprobs"}.get(error.param or ""))


def in_words_of_messages(error: RequestError) -> RequestError:
    """The engine's refusal of a chat with the field's name in a Messages request."""
    if error.code == "context_length_exceeded":
        # By these words Anthropic's clients know that they must shorten the conversation.
        error.message = f"prompt is too long: {error.message}"
        error.args = (error.message,)
    renamed = {
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "thinking_budget": "thinking.budget_tokens",
    }
    return _renamed(error, renamed.get(error.param or ""))


def in_words_of_completions(error: RequestError, request: CompletionRequest) -> RequestError:
    """The engine's refusal with the name of the field that the client gave."""
    if error.param == "n" and (request.best_of or 1) > (request.n or 1):
        return _renamed(error, "best_of")
    if error.param == "prompt_logprobs" and request.prompt_logprobs is None:
        return _renamed(error, "logprobs")
    return error


def _renamed(error: RequestError, param: str | None) -> RequestError:
    """With `param` for the field at fault, in a message that begins with it as well. None: as it is."""
    if param is None:
        return error
    old = f"{error.param} "
    if error.message.startswith(old):
        error.message = f"{param} {error.message.removeprefix(old)}"
        error.args = (error.message,)
    error.param = param
    return error


def completion_sampling(request: CompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields of SamplingParams that the request gives. Raises RequestError."""
    given = _common(request, None)
    if request.suffix:
        given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *infill_ends(tokenizer))
    if request.max_tokens == 0:
        if not request.echo:
            raise RequestError("max_tokens must be at least 1; 0 works with echo only", param="max_tokens")
        given["max_tokens"] = 1  # the engine always generates; the caller drops the token
    elif request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
    if request.prompt_logprobs is not None:
        given["prompt_logprobs"] = request.prompt_logprobs
    if request.echo and request.logprobs is not None and not request.resume_token_ids:
        asked = (request.logprobs, request.prompt_logprobs or 0)
        given["prompt_logprobs"] = -1 if -1 in asked else max(asked)
    if request.best_of is not None:
        n = request.n or 1
        if request.best_of < n:
            raise RequestError(f"best_of ({request.best_of}) must be at least n ({n})", param="best_of")
        if request.stream and request.best_of > n:
            raise RequestError(
                "best_of above n cannot be streamed: the best is known at the end", param="best_of"
            )
        given["n"] = request.best_of
        if request.best_of > n:
            given.setdefault("logprobs", 0)  # what the ranking needs
    return given


def _common(request: GenerationRequest, structured: StructuredSpec | None) -> dict[str, Any]:
    given = {name: value for name in _COPIED if (value := getattr(request, name)) is not None}
    if request.stop:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    spec = _structured(request)
    if spec is not None and structured is not None:
        raise RequestError(
            "a tool_choice that forces a call cannot be combined with another output constraint",
            param="tool_choice",
        )
    if (spec := spec or structured) is not None:
        given["structured"] = spec
    return given


def _structured(request: GenerationRequest) -> StructuredSpec | None:
    found = request.constraint
    return None if found is None else StructuredSpec(found.kind, found.value, param=found.param)


def check_sequences(prompts: int, n: int, config: EngineConfig, *, many: str = "n") -> None:
    """Refuse for good what would not fit an empty server: 429 asks a client to come back. `many`: the field
    that asked for `n` choices."""
    room = config.max_concurrent_requests + config.max_queued_requests
    if prompts * n > room:
        raise RequestError(
            f"{prompts} prompts of {n} choices are {prompts * n} sequences, but this server runs and queues "
            f"{room} in all; send them in several requests",
            param=many if prompts == 1 else "prompt",
        )


def extras(request: GenerationRequest) -> dict[str, Any]:
    """Arguments of `AsyncEngine.prepare` that are not sampling."""
    return {
        "priority_class": request.priority_class or "interactive",
        "queue_timeout": request.queue_timeout,
        "deadline": request.deadline,
        "cache_salt": request.cache_salt or "",
        "client": f"{request.cache_salt or ''}/{request.user or ''}",
        "resume_token_ids": request.resume_token_ids or (),
    }
