"""From the core's token ids to what callers see: text, stop strings, finish reasons, n choices.

Owns the per-choice state of every request in flight on the frontend's side. Used by `LLM` and `AsyncEngine`
alike:

    requests = processor.add(request)              # n > 1 becomes n CoreRequests; send them to the core
    earlier = processor.take_resumed(request)      # of a resumed request: its first delta
    deltas, aborts = processor.process(output)     # deliver the deltas; send the aborts to the core

The tokens of a resumed request pass through `process` as if the core had just sampled them. So detokenizer
and stop strings have the state that they had in the earlier attempt, and a stop that its output already
satisfies is found where that attempt found it. Then the core has nothing to generate and gets no request.

Invariants: a choice's text is final once given out; the tokens it reports end with the token that completed
the stop string or with the stop token; after a delta with a finish_reason nothing more comes of that choice,
whatever the core still sends. Not safe for threads: one owner calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from leadline.engine.errors import RequestError
from leadline.engine.frontend.detokenizer import Detokenizer, StopStrings
from leadline.engine.messages import CoreOutput, CoreRequest, FinishReason
from leadline.engine.outputs import OutputDelta
from leadline.engine.sampling_params import SamplingParams
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["OutputProcessor"]


@dataclass(slots=True)
class _Choice:
    """One sequence in flight. `request_id` is the caller's, not the core's."""

    request_id: str
    index: int
    request: CoreRequest
    detokenizer: Detokenizer
    stops: StopStrings
    plain: bool
    """It has no stop strings."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    ended: OutputDelta | None = None
    """A resumed request was over already, and the core computes no more than its prompt's logprobs."""


class OutputProcessor:
    """State of all requests in flight, keyed by the core's request ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}
        self._children: dict[str, list[str]] = {}
        self._resumed: dict[str, OutputDelta] = {}

    def __len__(self) -> int:
        """Requests (not choices) in flight."""
        return len(self._children)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._children

    def request_ids(self) -> list[str]:
        return list(self._children)

    def add(self, request: CoreRequest) -> list[CoreRequest]:
        """Register a validated request (its `sampling.n` may be above 1) and return the sequences to send to
        the core.

        Choice i draws with seed + i. Only choice 0 computes prompt logprobs: they are the same for all.
        Empty for a resumed request whose output is complete. Raises RequestError when a request of that id is
        in flight.
        """
        if request.request_id in self._children:
            raise RequestError(
                f"a request with id {request.request_id!r} is already in flight; ids must be unique",
                param="request_id",
                code="duplicate_request_id",
            )
        children = list(_fan_out(request))
        self._children[request.request_id] = [child.request_id for child in children]
        for index, child in enumerate(children):
            self._choices[child.request_id] = self._new_choice(request.request_id, index, child)
        return self._resume(children[0]) if request.num_resumed else children

    def take_resumed(self, request: CoreRequest) -> OutputDelta | None:
        """What the earlier attempt of a request that was just added gave out; None if there was none."""
        return self._resumed.pop(request.request_id, None) if request.num_resumed else None

    def process(self, output: CoreOutput) -> tuple[list[OutputDelta], list[str]]:
        """Digest one output of the core → (deltas for the caller, core request ids to abort).

        Outputs of requests that are finished or aborted here give nothing.
        """
        choice = self._choices.get(output.request_id)
        if choice is None:
            return [], []
        if output.num_cached_tokens:
            # Tokens of an earlier attempt may be cached as well, and are not of the prompt.
            choice.num_cached_tokens = min(output.num_cached_tokens, choice.num_prompt_tokens)
        if output.queue_seconds is not None:
            choice.queue_seconds = output.queue_seconds
        if choice.request.num_resumed and output.prompt_logprobs is not None:
            output.prompt_logprobs = output.prompt_logprobs[: choice.num_prompt_tokens - 1]
        if choice.ended is not None:
            return self._end(choice, choice.ended, output), []

        if output.finish_reason is None and choice.plain and len(output.new_token_ids) == 1:
            return [self._next_token(choice, output)], []
        text, taken, found = _digest(choice, output)
        finish: FinishReason | None = "stop" if found is not None else output.finish_reason
        delta = self._delta(choice, finish)
        delta.text = text
        delta.token_ids = output.new_token_ids[:taken]
        delta.logprobs = None if output.logprobs is None else output.logprobs[:taken]
        delta.prompt_logprobs = output.prompt_logprobs
        if found is not None:
            delta.stop_reason = found
        elif finish == "stop" and output.stop_token_id is not None:
            is_eos = output.stop_token_id in choice.request.eos_token_ids
            asked_for = output.stop_token_id in choice.request.sampling.stop_token_ids
            delta.stop_reason = output.stop_token_id if asked_for or not is_eos else None
        delta.error = output.error
        delta.failure = output.failure
        if finish is not None:
            self._forget(output.request_id)
        aborts = [output.request_id] if found is not None and output.finish_reason is None else []
        return [delta], aborts

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; return the core request ids to abort (empty when it is not in flight)."""
        children = self._children.pop(request_id, [])
        for child in children:
            self._choices.pop(child, None)
        return children

    def fail_all(self, error: str) -> list[OutputDelta]:
        """The core is gone: end every choice in flight with finish_reason "error"."""
        deltas = []
        for choice in self._choices.values():
            delta = self._delta(choice, "error")
            delta.error = error
            deltas.append(delta)
        self._choices.clear()
        self._children.clear()
        return deltas

    def _new_choice(self, request_id: str, index: int, child: CoreRequest) -> _Choice:
        sampling = child.sampling
        prompt_len = len(child.prompt_token_ids) - child.num_resumed
        detokenizer = Detokenizer(
            self._tokenizer,
            prompt_token_ids=child.prompt_token_ids[:prompt_len],
            skip_special_tokens=sampling.skip_special_tokens,
        )
        return _Choice(
            request_id,
            index,
            child,
            detokenizer,
            StopStrings(sampling.stop, include=sampling.include_stop_str_in_output),
            plain=not sampling.stop,
            num_prompt_tokens=prompt_len,
            num_output_tokens=0,
        )

    def _resume(self, child: CoreRequest) -> list[CoreRequest]:
        """Digest the tokens of an earlier attempt; return what is left for the core to do."""
        choice, sampling = self._choices[child.request_id], child.sampling
        earlier = self._delta(choice, None)
        stop_ids = {*child.eos_token_ids, *sampling.stop_token_ids}
        for count, token in enumerate(child.prompt_token_ids[choice.num_prompt_tokens :], 1):
            # As the core does it (core/results.py).
            output = CoreOutput(request_id=child.request_id, new_token_ids=[token])
            if token in stop_ids and count > sampling.min_tokens:
                output.finish_reason, output.stop_token_id = "stop", token
            elif count == sampling.max_tokens:
                output.finish_reason = "length"
            (delta,), _ = self.process(output)
            delta.text = earlier.text + delta.text
            delta.token_ids = earlier.token_ids + delta.token_ids
            earlier = delta
            if delta.finish_reason is not None:
                break
        earlier.resumed = True
        self._resumed[choice.request_id] = earlier
        if earlier.finish_reason is None:
            return [child]
        if sampling.prompt_logprobs is None:
            return []
        # The end of an answer carries the prompt's logprobs, which only the core can compute.
        choice.ended = self._resumed.pop(choice.request_id)
        self._choices[child.request_id] = choice
        self._children[choice.request_id] = [child.request_id]
        scored = SamplingParams(max_tokens=1, prompt_logprobs=sampling.prompt_logprobs)
        prompt = child.prompt_token_ids[: choice.num_prompt_tokens]
        return [msgspec.structs.replace(child, prompt_token_ids=prompt, num_resumed=0, sampling=scored)]

    def _end(self, choice: _Choice, ended: OutputDelta, output: CoreOutput) -> list[OutputDelta]:
        """The core has scored the prompt of a resumed request that was over already, or failed to."""
        if output.finish_reason not in ("stop", "length"):
            ended.finish_reason, ended.error = output.finish_reason, output.error
        ended.prompt_logprobs = output.prompt_logprobs
        ended.num_cached_tokens, ended.queue_seconds = choice.num_cached_tokens, choice.queue_seconds
        self._forget(output.request_id)
        return [ended]

    def _next_token(self, choice: _Choice, output: CoreOutput) -> OutputDelta:
        """What `process` does, for nearly every output there is: one more token, and no stop strings."""
        choice.num_output_tokens += 1
        delta = self._delta(choice, None)
        delta.text = choice.detokenizer.push(output.new_token_ids)
        delta.token_ids = output.new_token_ids
        delta.logprobs = output.logprobs
        delta.prompt_logprobs = output.prompt_logprobs
        delta.error = output.error
        return delta

    def _delta(self, choice: _Choice, finish: FinishReason | None) -> OutputDelta:
        return OutputDelta(
            request_id=choice.request_id,
            index=choice.index,
            finish_reason=finish,
            num_prompt_tokens=choice.num_prompt_tokens,
            num_cached_tokens=choice.num_cached_tokens,
            num_output_tokens=choice.num_output_tokens,
            queue_seconds=choice.queue_seconds,
        )

    def _forget(self, child_id: str) -> None:
        choice = self._choices.pop(child_id)
        siblings = self._children[choice.request_id]
        siblings.remove(child_id)
        if not siblings:
            del self._children[choice.request_id]


def _fan_out(request: CoreRequest) -> Iterator[CoreRequest]:
    n = request.sampling.n
    if n == 1:
        yield request
        return
    first = msgspec.structs.replace(request.sampling, n=1)
    later = msgspec.structs.replace(first, prompt_logprobs=None)
    for index in range(n):
        yield msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}/{index}",
            sampling=first if index == 0 else later,
            seed=_wrap64(request.seed + index),
        )


def _wrap64(seed: int) -> int:
    """Into the range of a signed 64-bit integer, which is what the sampler's tensors hold."""
    return (seed + 2**63) % 2**64 - 2**63


def _digest(choice: _Choice, output: CoreOutput) -> tuple[str, int, str | None]:
    """Run the new tokens through detokenizer and stop strings → (text, tokens taken, stop string found)."""
    sampling = choice.request.sampling
    text = ""
    last = len(output.new_token_ids) - 1
    for i, token_id in enumerate(output.new_token_ids):
        choice.num_output_tokens += 1
        if (
            i == last
            and output.finish_reason == "stop"
            and output.stop_token_id is not None
            and not sampling.include_stop_str_in_output
        ):
            break  # the EOS or stop token is reported, but is no text
        piece, found = choice.stops.push(
            choice.detokenizer.push((token_id,)), armed=choice.num_output_tokens >= sampling.min_tokens
        )
        text += piece
        if found is not None:
            return text, i + 1, found
    if output.finish_reason is not None:
        piece, found = choice.stops.push(
            choice.detokenizer.finish(), armed=choice.num_output_tokens >= sampling.min_tokens
        )
        text += piece
        if found is not None:
            return text, last + 1, found
        text += choice.stops.flush()
    return text, last + 1, None
