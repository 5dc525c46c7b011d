"""What all generation endpoints do with a request: answer it whole or as events, wait for the first delta
before the headers, merge streams, report errors, count usage."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.http.responses import (
    ApiError,
    EventStream,
    JSONBytes,
    api_error,
    read_body,
    sse,
)
from leadline.engine.server.http.socket_writer import SocketWriter
from leadline.engine.server.metrics.metrics import RequestTimer, outcome_of
from leadline.engine.server.state import ServerState, check_task
from leadline.protocol.openai.common import CompletionTokensDetails, PromptTokensDetails, StreamOptions, Usage

__all__ = [
    "Answer",
    "ChunkStream",
    "StreamUsage",
    "UsageCounter",
    "answered",
    "created_now",
    "finish_of",
    "finish_reason",
    "guarded",
    "matched_stop",
    "merge",
    "new_id",
]

logger = logging.getLogger("leadline.engine.server")


class GenerationBody(Protocol):
    """What a request body must have to be answered by `answered`."""

    @property
    def model(self) -> str | None: ...
    @property
    def stream(self) -> bool | None: ...


BodyT = TypeVar("BodyT", bound=GenerationBody)


class Answer(Protocol):
    """A request that is ready to run, in the shape of its endpoint."""

    @property
    def headers(self) -> dict[str, str]:
        """What the answer's headers say beside the usual."""

    async def whole(self, timer: RequestTimer) -> Any: ...
    def events(self, timer: RequestTimer, socket: SocketWriter) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream that are not written to `socket` on the spot."""

    def ending(self) -> bytes:
        """Return what follows the last event."""

    def failing(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that cannot go on."""


class ChunkStream:
    """How a stream of chunks ends, for the two older endpoints."""

    def ending(self) -> bytes:
        return sse(b"[DONE]")

    def failing(self, error: ApiError) -> bytes:
        return sse(error.body())


async def answered(
    request: Request,
    state: ServerState,
    kind: type[BodyT],
    endpoint: str,
    prepare: Callable[[BodyT, AsyncEngine], Awaitable[Answer]],
) -> Response:
    """The answer of one of the generation endpoints, whose bodies are `kind`; `endpoint` is its label in the
    metrics. Every request that the engine is there for is observed once, refused ones included."""
    body = await read_body(request, kind, state.settings.max_body_bytes)
    engine = state.admit()
    timer = RequestTimer(state.metrics, endpoint)
    try:
        state.check_model(body.model)
        check_task(engine, "generate")
        answer = await prepare(body, engine)
    except RecursionError:
        # What decodes may be too deep for what else walks through it: a schema, say.
        with timer:
            raise ApiError(400, "the request is nested too deeply", code="invalid_body") from None
    except BaseException as error:
        with timer:
            raise error
    if body.stream:
        socket = SocketWriter()
        events = guarded(request, answer, socket, timer)
        return await _streamed(events, socket, answer.headers)
    with timer:
        return JSONBytes(await answer.whole(timer), headers=answer.headers)


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def created_now() -> int:
    return int(time.time())


@dataclass(slots=True)
class UsageCounter:
    """Tokens of one HTTP request: of all its prompts and all their choices."""

    _prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _outputs: dict[tuple[str, int], int] = field(default_factory=dict)
    reasoning_tokens: dict[int, int] | None = None
    """By choice; None where the model writes no thoughts."""

    def add(self, delta: OutputDelta) -> None:
        # The choices of one prompt share it; the first one admitted says how much of it was cached.
        if delta.request_id not in self._prompts or delta.index == 0:
            self._prompts[delta.request_id] = (delta.num_prompt_tokens, delta.num_cached_tokens)
        self._outputs[delta.request_id, delta.index] = delta.num_output_tokens

    def usage(self, *, no_output: bool = False) -> Usage:
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        output = 0 if no_output else sum(self._outputs.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(cached for _, cached in self._prompts.values())
            ),
            completion_tokens_details=(
                UNSET
                if self.reasoning_tokens is None
                else CompletionTokensDetails(reasoning_tokens=sum(self.reasoning_tokens.values()))
            ),
        )


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which chunks of a stream tell the usage (`stream_options`)."""

    at_end: bool
    """In one more chunk after the last choice; a null usage in all others announces it, as with OpenAI."""
    in_every_chunk: bool

    @classmethod
    def of(cls, options: StreamOptions | None) -> StreamUsage:
        if options is None:
            return cls(False, False)
        # vLLM's clients may ask for both in one dictionary, and turn all of it off by the first.
        continuous = options.continuous_usage_stats and options.include_usage is not False
        return cls(bool(options.include_usage), bool(continuous))


def finish_of(last: list[OutputDelta | None]) -> str:
    """The outcome label of a request that ended well: "length" if any of its choices ran into a limit."""
    return (
        "length" if any(delta is not None and delta.finish_reason == "length" for delta in last) else "stop"
    )


def matched_stop(delta: OutputDelta) -> int | str | UnsetType:
    """Return what a choice whose last delta this is ended at: a stop string, a stop token or an end token."""
    if delta.stop_reason is not None:
        return delta.stop_reason
    return delta.token_ids[-1] if delta.finish_reason == "stop" and delta.token_ids else UNSET


def finish_reason(delta: OutputDelta) -> Literal["stop", "length"]:
    """Of a delta that ends its choice. The core's other reasons never get here: they are raised as
    exceptions."""
    return "length" if delta.finish_reason == "length" else "stop"


async def merge(
    streams: list[AsyncGenerator[OutputDelta, None]],
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Deltas of several requests as they come, each with its stream's index. Closing it closes them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, OutputDelta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[OutputDelta, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for delta in items:
                    queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(
    request: Request, answer: Answer, socket: SocketWriter, timer: RequestTimer
) -> AsyncGenerator[bytes, None]:
    """Yield the answer's events. Observe the request once, and turn an error after the first event into an
    event of its own: the status line is long gone by then. An error before it is raised, to become an HTTP
    status."""
    with timer:
        started = False
        try:
            async with aclosing(answer.events(timer, socket)) as events:
                async for event in events:
                    yield event
                    started = True
            if ending := answer.ending():
                yield ending
        except Exception as error:
            if not started:
                raise
            failure = api_error(error)
            if failure.status >= 500 and not isinstance(error, RequestError):
                log_failure(request, error, failure)
            timer.finish(outcome_of(error))
            yield answer.failing(failure)


async def _streamed(
    events: AsyncGenerator[bytes, None], socket: SocketWriter, headers: dict[str, str]
) -> Response:
    """Wait for the first event (queue full, timeouts and bad requests are real statuses), then stream."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_chain(first, events), socket, headers)


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def log_failure(request: Request, error: BaseException, answer: ApiError) -> None:
    """One line for what we expect to go wrong (the core died), a traceback for what we do not."""
    unexpected = answer.code == "internal_error"
    name = request.headers.get("x-request-id", "-")
    logger.error("request %s failed: %s", name, error, exc_info=error if unexpected else None)
