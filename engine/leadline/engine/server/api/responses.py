"""`POST /v1/responses`: a turn as a response object, or as typed events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from msgspec import UnsetType
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.api.generation import answered, created_now
from leadline.engine.server.api.logprobs import chat_logprobs
from leadline.engine.server.api.response_items import ResponseItems
from leadline.engine.server.api.turn import ChatTurn, Piece, prepare_turn
from leadline.engine.server.api.typed_events import EventWriter
from leadline.engine.server.http.responses import ApiError
from leadline.engine.server.http.socket_writer import SocketWriter
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.engine.server.state import ServerState
from leadline.protocol.openai.answers import ChatTokenLogprob
from leadline.protocol.openai.body import InvalidBody
from leadline.protocol.openai.common import Usage
from leadline.protocol.responses import ResponsesRequest, in_words_of_responses
from leadline.protocol.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
    ShownTool,
)

__all__ = ["create"]

logger = logging.getLogger("leadline.engine.server")


async def create(request: Request, state: ServerState) -> Response:
    return await answered(request, state, ResponsesRequest, "responses", _prepare)


async def _prepare(body: ResponsesRequest, engine: AsyncEngine) -> _Answer:
    try:
        turn = await prepare_turn(
            body.chat(), engine, prefix="resp_", answer_id=body.answer_id, created=body.answer_created
        )
    except InvalidBody as error:
        raise ApiError(400, error.message, param=error.param, code="invalid_body") from None
    except RequestError as error:
        raise in_words_of_responses(error) from None
    return _Answer(body, turn)


class _Answer:
    """A turn in the shape of a response."""

    def __init__(self, body: ResponsesRequest, turn: ChatTurn) -> None:
        self.headers = _headers(body, turn)
        self._body = body
        self._turn = turn
        turn.reads_in_order = True
        self._response = _begun(body, turn)
        self._writer = EventWriter(notes=bool(body.stream and body.return_token_ids))
        self._items = ResponseItems(self._writer, turn.id_of)

    async def whole(self, timer: RequestTimer) -> ResponseObject:
        turn = self._turn

        def take(delta: OutputDelta) -> bool:
            piece = turn.read(delta, timer)
            self._replay(piece)
            self._add(piece)
            return True

        with self._writer.muted():
            async with aclosing(turn.run(take)) as deltas:
                async for delta in deltas:
                    take(delta)
            self._finish()
        turn.finish(timer)
        self._response.completed_at = created_now()
        return self._response

    async def events(self, timer: RequestTimer, socket: SocketWriter) -> AsyncGenerator[bytes, None]:
        turn, writer, items = self._turn, self._writer, self._items
        plain = not self._body.wants_logprobs
        opened = False

        def take(delta: OutputDelta) -> bool:
            if not (opened and socket.ready):
                return False
            field = turn.plain_field(delta) if plain and items.open_field is not None else None
            if field is None:
                self._add(turn.read(delta, timer))
                writer.tokens(delta.token_ids)
                event = writer.take()
            else:
                # Not counted here: the choice's last delta says how many tokens there were.
                timer.delta(delta)
                event = items.text_event(field, delta.text, delta.token_ids)
            if event:
                socket.write(event)
            return True

        async with aclosing(turn.run(take)) as deltas:
            async for delta in deltas:
                piece = turn.read(delta, timer)
                self._replay(piece)
                if not piece.is_written:
                    continue
                if not opened:
                    self._open()
                    opened = True
                self._add(piece)
                if delta.token_ids:
                    writer.tokens(delta.token_ids)
                if delta.finish_reason is not None:
                    self._finish()
                elif event := writer.take():
                    yield event
        turn.finish(timer)
        last = ResponseCompleted if self._response.status == "completed" else ResponseIncomplete
        yield writer.close(last(response=self._response), turn.usage.usage())

    def ending(self) -> bytes:
        return b""

    def failing(self, error: ApiError) -> bytes:
        self._response.status = "failed"
        self._response.output = self._items.done
        self._response.error = ResponseFailure(code=_failure_code(error), message=error.message)
        return self._writer.fail(error, ResponseFailed(response=self._response))

    def _open(self) -> None:
        """Write the events that open a response."""
        writer = self._writer
        replayed, writer.next_number = writer.next_number, 0
        writer.add(ResponseCreated(response=self._response))
        writer.add(ResponseInProgress(response=self._response))
        writer.tokens([])
        given = self._body.resume_events
        # A client that has no event yet gets these.
        writer.next_number = (
            writer.next_number + replayed if given is None else max(given, writer.next_number)
        )

    def _replay(self, piece: Piece) -> None:
        """Bring the items to the state in which another pod left them."""
        if piece.earlier:
            with self._writer.muted():
                for parsed in piece.earlier:
                    self._items.add(parsed)

    def _add(self, piece: Piece) -> None:
        """Add what a piece brings to the items."""
        logprobs = self._logprobs(piece.delta)
        for step in piece.steps:
            self._items.add(step, logprobs)
            logprobs = []

    def _finish(self) -> None:
        """Fill in what the end of the output says."""
        turn, response = self._turn, self._response
        cut = turn.finish_reason(turn.choices[0]) == "length"
        self._items.finish(cut=cut)
        response.status = "incomplete" if cut else "completed"
        response.incomplete_details = IncompleteDetails() if cut else None
        response.output = self._items.done
        response.usage = _usage(turn.usage.usage())

    def _logprobs(self, delta: OutputDelta) -> list[ChatTokenLogprob]:
        if not self._body.wants_logprobs or not delta.logprobs:
            return []
        found = chat_logprobs(delta.logprobs, self._body.top_logprobs or 0, self._turn.engine.tokenizer)
        return found.content or []


def _begun(body: ResponsesRequest, turn: ChatTurn) -> ResponseObject:
    """The response before there is output."""
    response = ResponseObject(
        id=turn.id,
        created_at=turn.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=turn.engine.served_name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.resolved_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        temperature=turn.sampling.temperature,
        tool_choice=body.tool_choice or "auto",
        tools=[ShownTool.of(tool) for tool in body.function_tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=turn.sampling.top_p,
        user=body.user,
    )
    if body.reasoning is not None:
        response.reasoning = body.reasoning
    if body.text is not None:
        response.text.format = body.text.format or response.text.format
        response.text.verbosity = body.text.verbosity
    return response


def _headers(body: ResponsesRequest, turn: ChatTurn) -> dict[str, str]:
    """What the answer's headers say: the tools that are skipped, and fields that are not honoured."""
    fields = body.not_honoured
    if not fields:
        return turn.headers
    logger.info("fields that this server does not honour are skipped: %s", ", ".join(fields))
    skipped = turn.headers.get("X-Leadline-Skipped")
    return {**turn.headers, "X-Leadline-Skipped": ", ".join([*([skipped] if skipped else []), *fields])}


def _usage(usage: Usage) -> ResponseUsage:
    details, thoughts = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=details.cached_tokens if details else 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0 if isinstance(thoughts, UnsetType) else thoughts.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )


def _failure_code(error: ApiError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
