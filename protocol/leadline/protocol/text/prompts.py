"""The prompts of a request body, and their token ids.

The engine builds its prompts here, and so does the gateway, which must get the same ids to name the same
blocks. A request has one prompt, or several (`prompt` as a list); each is a
text or token ids, followed by the output that another pod already sent for it (`resume_token_ids`).

    chat            template over messages and tools         add_special_tokens: false by default
    text            the prompt itself                        add_special_tokens: true by default
    with a suffix   both, in the model's form (infill.py)    the same
    token ids       taken as they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from leadline.protocol.errors import RequestError
from leadline.protocol.openai.chat import ChatCompletionRequest, ChatMessage, CustomTool, Tool
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.openai.service import TokenizeRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.infill import infill_ids
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = [
    "PromptInput",
    "PromptRequest",
    "check_token_ids",
    "cut",
    "prompt_inputs",
    "prompt_token_ids",
    "token_strs",
    "tokens_kept",
    "tools_shown",
]

PromptRequest = ChatCompletionRequest | CompletionRequest | TokenizeRequest

ToolT = TypeVar("ToolT")


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt, before it is tokenized."""

    content: str | list[int]
    """A text (of a chat: rendered), or token ids."""
    add_special_tokens: bool = True
    """For a text: surround it with the tokenizer's special tokens."""
    resume_token_ids: Sequence[int] = ()
    """Output of an earlier attempt; it follows the prompt."""


def prompt_inputs(request: PromptRequest, renderer: ChatRenderer, tokenizer: Tokenizer) -> list[PromptInput]:
    """The prompts of a request, in order; one for a chat. Raises RequestError for what a template cannot
    take, and for a `suffix` where the model has no form for it."""
    if isinstance(request, CompletionRequest):
        special = request.add_special_tokens is not False
        resume = request.resume_token_ids or ()
        if request.suffix:
            return [
                PromptInput(infill_ids(content, request.suffix, tokenizer, special=special), False, resume)
                for content in request.prompts()
            ]
        return [PromptInput(content, special, resume) for content in request.prompts()]
    if isinstance(request, ChatCompletionRequest):
        text = _render(request, request.messages, tools_shown(request.tools, request.tool_choice), renderer)
        return [PromptInput(text, bool(request.add_special_tokens), request.resume_token_ids or ())]
    if request.messages is not None:
        text = _render(request, request.messages, request.tools, renderer)
        return [PromptInput(text, bool(request.add_special_tokens))]
    return [PromptInput(request.prompt or "", request.add_special_tokens is not False)]


def prompt_token_ids(prompt: PromptInput, tokenizer: Tokenizer) -> list[int]:
    """Token ids of one prompt, resumed output included, without asking whether they fit the model. Raises
    RequestError for text that has no UTF-8 form."""
    content = prompt.content
    ids = tokenizer.encode(content, prompt.add_special_tokens) if isinstance(content, str) else content
    return [*ids, *prompt.resume_token_ids] if prompt.resume_token_ids else ids


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError for ids beyond the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        raise RequestError(
            f"{param} holds the token id {max(token_ids)}, but the vocabulary ends at {vocab_size - 1}",
            param=param,
        )


def token_strs(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the vocabulary's entry of each token; "" where it has none."""
    return [tokenizer.entry(token_id) for token_id in token_ids]


def tokens_kept(request: PromptRequest, max_model_len: int) -> int | None:
    """Return how many tokens of the prompt are used (`truncate_prompt_tokens`); None: all.
    `max_model_len` 0: not known."""
    asked: int | None = getattr(request, "truncate_prompt_tokens", None)
    if asked != -1:
        return asked
    if not max_model_len:
        return None
    output = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None) or 1
    return max(1, max_model_len - output)


def cut(request: PromptRequest, token_ids: list[int], kept: int) -> list[int]:
    """Return the `kept` tokens of a prompt that are used (`truncation_side`)."""
    right = getattr(request, "truncation_side", None) == "right"
    return token_ids[:kept] if right else token_ids[-kept:]


def tools_shown(tools: Sequence[ToolT] | None, tool_choice: object) -> Sequence[ToolT] | None:
    """The tools that the template sees: None with tool_choice "none"."""
    return None if not tools or tool_choice == "none" else tools


def _render(
    request: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool | CustomTool] | None,
    renderer: ChatRenderer,
) -> str:
    continues = bool(request.continue_final_message)
    opens = request.add_generation_prompt
    plain: list[Mapping[str, Any]] = msgspec.to_builtins(list(messages))
    return renderer.render(
        plain,
        tools=msgspec.to_builtins(list(tools)) if tools else None,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
    )
