"""What crosses between the frontend (tokenizer, HTTP) and the engine core, in process or over ZeroMQ.

msgspec Structs: encoded as msgpack on the wire, never pickled. Times are seconds of `time.monotonic()`,
which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from leadline.engine.sampling_params import SamplingParams

__all__ = [
    "CoreOutput",
    "CoreRequest",
    "Failure",
    "FinishReason",
    "PoolingRequest",
    "PriorityClass",
    "ThoughtSpec",
    "TokenLogprobs",
]

PriorityClass = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "abort", "queue_timeout", "deadline", "error"]


class ThoughtSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the core needs to know of a model's thought, in tokens."""

    begins: Literal["inside", "maybe", "between"]
    """Where the output begins: inside the thought; where its first token tells whether there is one; or
    between messages, of which some are thoughts."""
    ends: tuple[tuple[int, ...], ...]
    """Token sequences that end a thought."""
    opens: tuple[tuple[int, ...], ...] = ()
    """Token sequences that open one. Of those with one token, each may open it from `maybe`."""
    answers: tuple[tuple[int, ...], ...] = ()
    """Token sequences that begin the answer. Empty: the end of the thought does."""
    heading: tuple[int, ...] = ()
    """Tokens that stand between the end of a message and an opening, or the beginning of the answer. Empty:
    messages of other kinds may come too, such as calls."""
    blanks: tuple[int, ...] = ()
    """Tokens of white space. At `maybe` they may come before the tokens that open a thought."""
    budget: int | None = None
    """Tokens a thought may have, tags aside; then `closing` is forced. None: any number."""
    closing: tuple[int, ...] = ()


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """One sequence to generate, already validated. `n > 1` is fanned out by the frontend into n of these."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """max_tokens is resolved (never None) and n is 1 here."""
    seed: int
    """Resolved 64-bit seed."""
    priority_class: PriorityClass = "interactive"
    arrival: float
    queue_timeout: float | None = None
    """Seconds after arrival by which it must have been admitted."""
    deadline: float | None = None
    """Absolute monotonic time by which it must have finished."""
    cache_salt: str = ""
    client: str = ""
    """The client that asks. Clients take turns where requests wait for a grammar."""
    eos_token_ids: tuple[int, ...] = ()
    """Empty when ignore_eos."""
    num_resumed: int = 0
    """The last num_resumed prompt tokens are output of an earlier attempt (another pod): sampling
    counters, penalties, min_tokens and max_tokens count them as output. They satisfy no stop: a request of
    which they do does not get to the core."""
    thought: ThoughtSpec | None = None
    """The output may begin with a thought: `sampling.structured` constrains what comes behind it."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pool"):
    """Inputs to turn into vectors or scores, already validated. It ends with one CoreOutput."""

    request_id: str
    inputs: list[list[int]]
    """Token ids of each input."""
    boundaries: list[int] | None = None
    """Of pairs: where the second text of each input begins."""
    dimensions: int | None = None
    """Values to keep of each vector. None: all."""
    priority_class: PriorityClass = "interactive"
    arrival: float
    queue_timeout: float | None = None
    """Seconds after arrival by which its first input must be computed."""
    deadline: float | None = None
    """Absolute monotonic time by which it must have finished."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Failure(msgspec.Struct, frozen=True):
    """An exception of `leadline.engine.errors`, by the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class CoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The output of one request after a step."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """Aligned with new_token_ids when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first token: entries for prompt positions 1 .. len-1."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS or stop token that ended it (it is the last of new_token_ids)."""
    error: str | None = None
    failure: Failure | None = None
    """With finish_reason "error": what to raise, if it is more than the engine's own fault."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache at first admission."""
    queue_seconds: float | None = None
    """Arrival to first admission; set on the first output."""
    num_preemptions: int = 0
    pooled: bytes = b""
    """Of a PoolingRequest: float32 values of this machine, the inputs' vectors or scores in order."""
