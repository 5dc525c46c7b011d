"""`POST /v1/completions`: one or more prompts, n choices each, echo, logprobs, best_of.

Choice c of prompt p is number p * n + c of the answer, as OpenAI orders them. Every prompt is a request of
its own to the engine; their deltas are merged as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.messages import CoreRequest, TokenLogprobs
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.api.generation import (
    ChunkStream,
    StreamUsage,
    UsageCounter,
    answered,
    created_now,
    finish_of,
    finish_reason,
    matched_stop,
    merge,
    new_id,
)
from leadline.engine.server.api.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from leadline.engine.server.api.params import (
    check_sequences,
    completion_sampling,
    extras,
    in_words_of_completions,
    prompts_of,
)
from leadline.engine.server.http.responses import sse
from leadline.engine.server.http.socket_writer import EventTemplate, SocketWriter
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.engine.server.state import ServerState
from leadline.protocol.openai.answers import Completion, CompletionChoice, CompletionLogprobs
from leadline.protocol.openai.completion import CompletionRequest

__all__ = ["create"]

_MAX_PROMPTS = 2048


async def create(request: Request, state: ServerState) -> Response:
    return await answered(request, state, CompletionRequest, "completions", _prepare)


async def _prepare(body: CompletionRequest, engine: AsyncEngine) -> _Answer:
    sampling = engine.builder.sampling_params(completion_sampling(body, engine.tokenizer))
    prompts = await prompts_of(body, engine)
    if len(prompts) > _MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompts)} prompts, more than {_MAX_PROMPTS}", param="prompt")
    many = "best_of" if (body.best_of or 1) > (body.n or 1) else "n"
    check_sequences(len(prompts), sampling.n, engine.config, many=many)
    if body.resume_token_ids and len(prompts) > 1:
        raise RequestError("resume_token_ids goes with a single prompt", param="resume_token_ids")
    answer_id = new_id("cmpl-")
    requests: list[CoreRequest] = []
    for index, prompt in enumerate(prompts):
        if requests:
            await asyncio.sleep(0)  # a thousand prompts are a second of work, and streams wait for this loop
        try:
            request = await engine.prepare(
                prompt.content,
                sampling,
                request_id=f"{answer_id}-{index}",
                add_special_tokens=prompt.add_special_tokens,
                **extras(body),
            )
        except RequestError as error:
            raise in_words_of_completions(error, body) from None
        requests.append(request)
        sampling = replace(sampling, bad_words=request.sampling.bad_words)  # tokenized once for all prompts
    return _Answer(body, engine, answer_id, [prompt.content for prompt in prompts], requests)


@dataclass(slots=True)
class _Choice:
    """What a choice of the answer has been given so far."""

    logprobs: CompletionLogprobsBuilder | None = None
    echo_text: str = ""
    """Prompt to put in front of the first chunk."""
    echo_ids: list[int] | None = None
    texts: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: OutputDelta | None = None

    @property
    def score(self) -> float:
        """Log probability per token, by which `best_of` ranks."""
        return sum(entry.logprob for entry in self.entries) / max(1, len(self.entries))


class _Answer(ChunkStream):
    """One HTTP request: its engine requests, and how their deltas become an answer or chunks of one."""

    def __init__(
        self,
        body: CompletionRequest,
        engine: AsyncEngine,
        answer_id: str,
        prompts: list[str | list[int]],
        requests: list[CoreRequest],
    ) -> None:
        self.headers = body.skipped_header
        self._body = body
        self._engine = engine
        self._requests = requests
        self._n = requests[0].sampling.n
        self._id = answer_id
        self._created = created_now()
        self._usage = UsageCounter()
        self._score_only = body.max_tokens == 0
        self._prompt_rows: list[list[TokenLogprobs] | None] = [None] * len(requests)
        self._early: list[list[OutputDelta]] = [[] for _ in requests]
        """Deltas of choices that came before the log probabilities of their prompt."""
        self._choices = [
            [self._new_choice(prompt, request) for _ in range(self._n)]
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _new_choice(self, prompt: str | list[int], request: CoreRequest) -> _Choice:
        body, tokenizer = self._body, self._engine.tokenizer
        choice = _Choice()
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            count = request.sampling.logprobs if body.logprobs < 0 else body.logprobs
            choice.logprobs = CompletionLogprobsBuilder(count or 0, tokenizer, as_ids=as_ids)
            if request.num_resumed:
                begin = 0 if body.echo else -request.num_resumed
                choice.logprobs.skip(request.prompt_token_ids[begin:])
        if body.echo and not request.num_resumed:  # else the earlier attempt has echoed it
            choice.echo_ids = request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_resumed]
            choice.echo_text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        return choice

    async def whole(self, timer: RequestTimer) -> Completion:
        def take(prompt: int, delta: OutputDelta) -> bool:
            timer.delta(delta)
            self._usage.add(delta)
            if delta.prompt_logprobs is not None:
                self._prompt_rows[prompt] = delta.prompt_logprobs
            self._collect(prompt, delta)
            return True

        async with aclosing(self._deltas(take)) as deltas:
            async for prompt, delta in deltas:
                take(prompt, delta)
        timer.finish(finish_of([c.last for group in self._choices for c in group]))
        n = self._body.n or 1
        choices = []
        for prompt, group in enumerate(self._choices):
            best = sorted(group, key=lambda choice: -choice.score)[:n] if len(group) > n else group
            for rank, choice in enumerate(best):
                choices.append(self._finished(prompt, prompt * n + rank, choice))
        return self._envelope(choices, usage=True)

    async def events(self, timer: RequestTimer, socket: SocketWriter) -> AsyncGenerator[bytes, None]:
        body = self._body
        last: list[OutputDelta | None] = []
        options = StreamUsage.of(body.stream_options)
        templates = self._templates(options)
        wants_ids = bool(body.return_token_ids)

        def take(prompt: int, delta: OutputDelta) -> bool:
            if not templates or not socket.ready or self._choices[prompt][delta.index].last is None:
                return False
            # Not counted here: the choice's last delta says how many tokens there were.
            timer.delta(delta)
            if delta.text or wants_ids:
                socket.write(templates[prompt * self._n + delta.index].event(delta.text, delta.token_ids))
            return True

        async with aclosing(self._deltas(take)) as deltas:
            async for prompt, arrived in deltas:
                timer.delta(arrived)
                for delta in self._in_order(prompt, arrived):
                    self._usage.add(delta)
                    if delta.finish_reason is not None:
                        last.append(delta)
                    chunk = self._chunk(prompt, self._choices[prompt][delta.index], delta)
                    if chunk is not None:
                        yield sse(self._chunk_of([chunk], options))
        timer.finish(finish_of(last))
        if options.at_end:
            yield sse(self._envelope([], usage=True))

    def _in_order(self, prompt: int, delta: OutputDelta) -> list[OutputDelta]:
        """The deltas that can be shown now. Where choices show the prompt's log probabilities, which come
        with the first delta of choice 0, those of the others wait for it."""
        if delta.prompt_logprobs is not None:
            self._prompt_rows[prompt] = delta.prompt_logprobs
        if self._requests[prompt].sampling.prompt_logprobs is None or self._choices[prompt][0].last:
            return [delta]
        early = self._early[prompt]
        if delta.index:
            early.append(delta)
            return []
        self._early[prompt] = []
        return [delta, *early]

    def _deltas(
        self, take: Callable[[int, OutputDelta], bool]
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        if len(self._requests) == 1:
            request = self._requests[0]
            deltas = self._engine.run(request, partial(take, 0))
            return merge([_news(deltas) if request.num_resumed else deltas])
        # Merged deltas wait in one more queue, which nothing may overtake.
        return merge([self._engine.run(request) for request in self._requests])

    def _templates(self, options: StreamUsage) -> list[EventTemplate]:
        """Return templates of the chunk that has only text (and its token ids), for each choice; none where
        there is more."""
        body = self._body
        if self._score_only or body.logprobs is not None or len(self._requests) > 1 or options.in_every_chunk:
            return []
        templates = []
        for index in range(self._n):
            chunk = CompletionChoice(index=index, text=EventTemplate.TEXT, logprobs=None, finish_reason=None)
            if body.return_token_ids:
                chunk.token_ids = EventTemplate.IDS
            templates.append(EventTemplate(self._chunk_of([chunk], options)))
        return templates

    def _collect(self, prompt: int, delta: OutputDelta) -> None:
        choice = self._choices[prompt][delta.index]
        choice.last = delta
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.entries += delta.logprobs

    def _echo_columns(self, prompt: int, choice: _Choice) -> CompletionLogprobs | None:
        rows = self._prompt_rows[prompt]
        if choice.logprobs is None or choice.echo_ids is None:
            return None
        return choice.logprobs.prompt(choice.echo_ids, rows or [])

    def _finished(self, prompt: int, index: int, choice: _Choice) -> CompletionChoice:
        assert choice.last is not None
        columns: list[CompletionLogprobs] = []
        if choice.logprobs is not None:
            # Not before the end: a choice whose prompt is cached overtakes the one that scores the prompt.
            if (echoed := self._echo_columns(prompt, choice)) is not None:
                columns.append(echoed)
            if not self._score_only:
                columns.append(choice.logprobs.output(choice.entries))
        result = CompletionChoice(
            index=index,
            text=choice.echo_text + ("" if self._score_only else "".join(choice.texts)),
            logprobs=_concatenated(columns) if choice.logprobs is not None else None,
            finish_reason="length" if self._score_only else finish_reason(choice.last),
        )
        self._extend(result, prompt, choice.token_ids, choice.last)
        for name in ("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"):
            if getattr(result, name) is UNSET:
                setattr(result, name, None)
        if self._body.shows_prompt_ids:
            result.prompt_token_ids = self._requests[prompt].prompt_token_ids
        return result

    def _chunk(self, prompt: int, choice: _Choice, delta: OutputDelta) -> CompletionChoice | None:
        first = choice.last is None
        choice.last = delta
        text = "" if self._score_only else delta.text
        columns = []
        if first:
            text = choice.echo_text + text
            if (echoed := self._echo_columns(prompt, choice)) is not None:
                columns.append(echoed)
        if choice.logprobs is not None and delta.logprobs and not self._score_only:
            columns.append(choice.logprobs.output(delta.logprobs))
        wants_ids = bool(self._body.return_token_ids) and delta.token_ids
        if not (text or first or columns or wants_ids or delta.finish_reason):
            return None
        finish = None
        if delta.finish_reason is not None:
            finish = "length" if self._score_only else finish_reason(delta)
        chunk = CompletionChoice(
            index=prompt * self._n + delta.index,
            text=text,
            logprobs=_concatenated(columns) if columns else None,
            finish_reason=finish,
        )
        self._extend(chunk, prompt, delta.token_ids, delta)
        if first and self._body.shows_prompt_ids:
            chunk.prompt_token_ids = self._requests[prompt].prompt_token_ids
        return chunk

    def _extend(
        self, choice: CompletionChoice, prompt: int, token_ids: list[int], delta: OutputDelta
    ) -> None:
        """Fill in the fields that are ours, where the request asked for them or they say something."""
        if self._body.return_token_ids:
            choice.token_ids = [] if self._score_only else token_ids
        if not self._score_only:
            if delta.stop_reason is not None:
                choice.stop_reason = delta.stop_reason
            choice.matched_stop = matched_stop(delta)
        rows, asked = self._prompt_rows[prompt], self._body.prompt_logprobs
        if asked is not None and rows is not None and delta.finish_reason is not None:
            count = self._requests[prompt].sampling.prompt_logprobs if asked < 0 else asked
            choice.prompt_logprobs = prompt_logprobs(rows, count or 0, self._engine.tokenizer)

    def _chunk_of(self, choices: list[CompletionChoice], options: StreamUsage) -> Completion:
        chunk = self._envelope(choices, usage=options.in_every_chunk)
        if options.at_end and not options.in_every_chunk:
            chunk.usage = None
        return chunk

    def _envelope(self, choices: list[CompletionChoice], *, usage: bool) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._engine.served_name,
            choices=choices,
            usage=self._usage.usage(no_output=self._score_only) if usage else UNSET,
        )


async def _news(deltas: AsyncGenerator[OutputDelta, None]) -> AsyncGenerator[OutputDelta, None]:
    """Leave out what an earlier attempt has given out."""
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.resumed:
                if delta.finish_reason is None:
                    continue
                delta.text, delta.token_ids = "", []
            yield delta


def _concatenated(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    if len(parts) == 1:
        return parts[0]
    whole = CompletionLogprobs(top_logprobs=[])
    assert whole.top_logprobs is not None
    for part in parts:
        whole.text_offset += part.text_offset
        whole.token_logprobs += part.token_logprobs
        whole.tokens += part.tokens
        whole.top_logprobs += part.top_logprobs or []
    return whole
