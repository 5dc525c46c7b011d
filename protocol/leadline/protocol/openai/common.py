"""Parts of the OpenAI API that chat and text completions share: sampling fields, constraints, usage.

Request fields are nullable because clients send explicit nulls; null and absent both mean "not given", and
the server fills in its defaults (which may come from the model's generation_config.json). Ranges here hold
for every model; what depends on the model or on other fields is checked where requests are admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from leadline.protocol.openai.constraints import (
    Choices,
    Constraint,
    ResponseFormat,
    StructuredOutputs,
    constraint_of,
)
from leadline.protocol.openai.other_servers import NOT_OF_OURS, OtherServersFields

__all__ = [
    "NOT_SUPPORTED",
    "BadWords",
    "CompletionTokensDetails",
    "FinishReason",
    "GenerationRequest",
    "MaxTokens",
    "NonEmptyStr",
    "Penalty",
    "PriorityClass",
    "PromptTokensDetails",
    "StreamOptions",
    "TokenId",
    "TokenIds",
    "Usage",
    "limit_of",
    "refused",
]

PriorityClass = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
MaxTokens = Annotated[int, Meta(ge=-1)]
"""A limit of the output; -1 is none. `limit_of` says which values a field takes."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
BadWords = Annotated[list[NonEmptyStr], Meta(max_length=1024)]
StopList = Annotated[list[NonEmptyStr], Meta(max_length=64)]


# msgspec leaves the keys of a mapping out of its JSON Schema.
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """Send one more chunk before [DONE], with empty choices and the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Extension: the usage so far in every chunk."""


NOT_SUPPORTED = {
    "json_schema": "use response_format",
    "ebnf": "use grammar",
    "use_beam_search": "use sampling, with best_of in /v1/completions",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words, regex or grammar",
    "prompt_embeds": "use a text or token ids",
    **NOT_OF_OURS,
}
"""Fields of other servers and of older clients that would change the answer, and what there is instead. All
of them may be null, and may have the value that changes nothing."""

Nothing = Annotated[list[Any], Meta(max_length=0)]


def refused(field: str) -> ValueError:
    """Of a field whose type alone does not refuse it; written like msgspec's errors, which name a path."""
    return ValueError(f"not supported - at `$.{field}`")


def limit_of(field: str, given: int | None, *, least: int) -> int | None:
    """A limit of the output as it counts: -1 means none. ValueError, written as `refused`, below `least`."""
    if given == -1:
        return None
    if given is not None and given < least:
        raise ValueError(f"Expected `int` >= {least}, or -1 for no limit - at `$.{field}`")
    return given


class GenerationRequest(OtherServersFields, kw_only=True):
    """Fields that both kinds of request have."""

    model: str | None = None
    """Served name; null or absent: the only model there is."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """0: the likeliest token, as temperature 0."""
    stop: str | StopList | None = None
    """"": none."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    """Token id to bias; JSON writes the ids as strings."""
    user: str | None = None
    response_format: ResponseFormat | None = None

    # Extensions: not in OpenAI's API.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 turns it off, as does the -1 of other servers."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    """The whole output must match it. A request holds one constraint at most."""
    grammar: str | None = None
    """Grammar, in llguidance's Lark dialect or in GBNF, that the whole output must match."""
    allowed_token_ids: TokenIds | None = None
    """No other token is sampled, be it an end token."""
    bad_words: BadWords | None = None
    """Texts that the output does not contain, as the sequences of tokens that write them, at the beginning of
    a text and behind a space."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's constraints."""
    guided_json: dict[str, Any] | str | None = None
    """These four are vLLM's older constraints. A JSON Schema, or the text of one."""
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    """Prefix cache entries are shared only among requests with equal salt."""
    priority_class: PriorityClass | None = None
    priority: int | None = None
    """vLLM's field. Above 0, where smaller numbers go first: class batch; else interactive. `priority_class`
    wins."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Use only the last so many tokens of the prompt; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` cuts; left by default. right: the first so many tokens are used."""
    session_id: str | None = None
    """What keeps requests on one pod with the routing policy `session`; wins over `user`."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:123`."""
    queue_timeout: Annotated[float, Meta(ge=0)] | None = None
    """Seconds the request may wait for admission; then 503. 0: served only if there is capacity at once."""
    deadline: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from now by which the answer must be complete; then 504."""
    resume_token_ids: list[TokenId] | None = None
    """Output that another pod already sent for this request: generation goes on behind it."""
    return_token_ids: bool | None = None
    """Report token ids beside the text: the output's, and the prompt's once."""
    return_prompt_token_ids: bool | None = None
    """false: those of the prompt are left out. Gateways set it for streams that they may have to move."""

    # Refused, since an answer without them would not be what was asked for (NOT_SUPPORTED).
    json_schema: None = None
    ebnf: None = None
    use_beam_search: bool | None = None
    logits_processors: Nothing | None = None
    prompt_embeds: None = None

    not_supported: ClassVar[Mapping[str, str]] = NOT_SUPPORTED

    def __post_init__(self) -> None:
        if self.use_beam_search:
            raise refused("use_beam_search")
        if self.priority is not None and self.priority_class is None:
            self.priority_class = "batch" if self.priority > 0 else "interactive"
        if self.truncate_prompt_tokens == 0:
            raise ValueError("Expected `int` >= 1, or -1 - at `$.truncate_prompt_tokens`")
        constraint_of(self)  # raises where there are several

    @property
    def shows_prompt_ids(self) -> bool:
        """Whether the answer has the prompt's token ids. A resumed one has not: the first attempt has."""
        return bool(
            self.return_token_ids and self.return_prompt_token_ids is not False and not self.resume_token_ids
        )

    @property
    def constraint(self) -> Constraint | None:
        """What the whole output must match."""
        return constraint_of(self)


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: Count = 0
    """Prompt tokens whose KV came from the prefix cache."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: Count = 0
    """Output tokens of thoughts."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: Count
    completion_tokens: Count
    """Of all choices together."""
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only of models that write thoughts."""
