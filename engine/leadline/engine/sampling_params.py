"""What a caller may ask of sampling.

Pure data, shared by the offline API, the server and the core's wire format.

Range checks that need no model live in `SamplingParams.validate`; checks against the vocabulary, the
context length or the engine's caps live in `leadline.engine.frontend.validation`, the one place that
admits requests.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from leadline.engine.errors import RequestError

__all__ = ["SamplingParams", "StructuredSpec", "typed"]


class StructuredSpec(msgspec.Struct, frozen=True):
    """A constraint on the output's form."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    value: str = ""
    """The schema as JSON text, the regular expression, or the grammar; empty for json_object."""
    calls: str = ""
    """For JSON: Lark rules of `calls`, what may come in its place (`tool_schema.or_calls`)."""
    param: str | None = None
    """The request's field that asks for it, where `kind` does not tell."""


_ALL = (1 << 31) - 1
"""A top_k beyond any vocabulary; larger ones, which mean the same, do not fit the message to the core."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick each next token, and when to stop.

    Temperatures below 1e-3 mean greedy, as does top_p 0. top_k 0, top_p 1 and min_p 0 are off. Penalties
    follow the OpenAI API (presence, frequency: over output tokens) and the CTRL paper (repetition: over
    prompt and output).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """Alternatives reported per output token; 0 reports the chosen token alone."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: StructuredSpec | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is sampled."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or sequences of token ids, that the output does not contain. Admission replaces texts by the
    sequences that they are made of."""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-3

    @property
    def reads_output(self) -> bool:
        """Whether the sampler has to know the tokens that it has sampled: it counts them, or looks for the
        beginning of a bad word among them."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
        )

    def validate(self) -> SamplingParams:
        """These parameters in their own types (`typed`), or RequestError naming the one that is wrong, its
        value and its range."""
        return typed(msgspec.structs.asdict(self))._in_range()

    def _in_range(self) -> SamplingParams:
        def need(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {rule}, got {getattr(self, param)!r}", param=param)

        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            need(math.isfinite(getattr(self, name)), name, "a finite number")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        need(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        need(self.top_k >= 0, "top_k", "at least 0 (0 turns it off)")
        need(0.0 <= self.top_p <= 1.0, "top_p", "between 0 and 1")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "in (0, 100]")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        need(self.n >= 1, "n", "at least 1")
        need(self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0")
        need(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "at least 0")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(all(self.stop), "stop", "free of empty strings")
        need(self.allowed_token_ids != (), "allowed_token_ids", "null or hold at least one token id")
        need(all(self.bad_words), "bad_words", "free of empty strings")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise RequestError(
                    f"logit_bias[{token}] must map a token id to a number between -100 and 100, got {bias!r}",
                    param="logit_bias",
                )
        return self


def typed(given: Mapping[str, Any]) -> SamplingParams:
    """Of values as people write them: `stop` and `bad_words` may be one string, keys of `logit_bias` decimal
    text as in JSON, `top_k` -1 for 0, `top_p` 0 for temperature 0, anything None for its default, numbers and
    lists numpy's. Raises RequestError naming the parameter of a wrong type."""
    fields = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in given.items()
        if value is not None
    }
    for name in ("stop", "bad_words"):
        if isinstance(fields.get(name), str):
            fields[name] = (fields[name],)
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    if isinstance(fields.get("top_k"), int):
        fields["top_k"] = min(fields["top_k"], _ALL)
    if fields.get("top_p") == 0 and not isinstance(fields["top_p"], bool):
        fields["top_p"], fields["temperature"] = 1.0, 0.0
    if isinstance(fields.get("logit_bias"), Mapping):
        fields["logit_bias"] = {_token_id(key): value for key, value in fields["logit_bias"].items()}
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").split("[")[0] or None
        raise RequestError(f"{param or 'sampling parameters'}: {message}", param=param) from error


def _token_id(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    if not isinstance(key, str | bool):
        try:
            return operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise RequestError(f"logit_bias maps token ids to numbers; {key!r} is not a token id", param="logit_bias")
