"""Requests of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.openai.common import (
    NOT_SUPPORTED,
    GenerationRequest,
    MaxTokens,
    NonEmptyStr,
    TokenId,
    TokenIds,
    limit_of,
)

__all__ = ["CompletionRequest", "Prompt"]

_TOKEN_IDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32},
}

# msgspec allows one array type in a union, so "a list of one kind" is checked after decoding; the schema in
# the OpenAPI document says it in full.
Prompt = Annotated[
    NonEmptyStr | Annotated[list[NonEmptyStr | TokenId | TokenIds], Meta(min_length=1)],
    Meta(
        extra_json_schema={
            "oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                _TOKEN_IDS,
                {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: Prompt
    """A string, several strings, one list of token ids, or several such lists."""
    max_tokens: MaxTokens | None = None
    """0 only together with echo: score the prompt and generate nothing."""
    echo: bool | None = None
    """Put the prompt in front of the answer."""
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """Alternatives per token; 0 reports the chosen token alone, -1 the whole vocabulary."""
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None
    """What follows the answer, for models with fill-in-the-middle tokens."""

    # Extensions.
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """Alternatives per prompt token."""
    add_special_tokens: bool | None = None
    """Tokenize string prompts with the model's BOS; true by default."""
    thinking_token_budget: Literal[-1] | None = None

    not_supported: ClassVar[Mapping[str, str]] = {
        **NOT_SUPPORTED,
        "thinking_token_budget": "use /v1/chat/completions, where thoughts are told from answers",
    }

    def __post_init__(self) -> None:
        GenerationRequest.__post_init__(self)
        self.max_tokens = limit_of("max_tokens", self.max_tokens, least=0)
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise ValueError("Expected neither echo nor truncate_prompt_tokens beside it - at `$.suffix`")
        if isinstance(self.prompt, list) and len({type(item) for item in self.prompt}) > 1:
            # Written like msgspec's own messages, from which the JSON path is read.
            raise ValueError(
                "Expected strings, token ids or lists of token ids, but not a mixture - at `$.prompt`"
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, in order: each a string or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [msgspec.convert(self.prompt, list[int])]
        return list(self.prompt)  # type: ignore[arg-type]
