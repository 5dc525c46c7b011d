"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a turn as a message, or as typed events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.api.generation import answered
from leadline.engine.server.api.message_blocks import BlockEvents, BlockList
from leadline.engine.server.api.params import encode, in_words_of_messages, prompts_of
from leadline.engine.server.api.turn import ChatTurn, prepare_turn
from leadline.engine.server.api.typed_events import EventWriter
from leadline.engine.server.http.responses import ApiError, JSONBytes, read_body
from leadline.engine.server.http.socket_writer import SocketWriter
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.engine.server.state import ServerState, check_task
from leadline.protocol.anthropic.answers import (
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageTokensCount,
    MessageUsage,
    Ping,
    Stop,
)
from leadline.protocol.anthropic.errors import ErrorEvent
from leadline.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from leadline.protocol.openai import ChatCompletionRequest, InvalidBody

__all__ = ["count_tokens", "create"]


async def create(request: Request, state: ServerState) -> Response:
    return await answered(request, state, MessagesRequest, "messages", _prepare)


async def count_tokens(request: Request, state: ServerState) -> Response:
    """As `usage` of the request would count the prompt."""
    body = await read_body(request, CountTokensRequest, state.settings.max_body_bytes)
    engine = state.admit()
    state.check_model(body.model)
    check_task(engine, "generate")
    (prompt,) = await prompts_of(_chat(body), engine)
    return JSONBytes(MessageTokensCount(input_tokens=len(await encode(prompt, engine))))


async def _prepare(body: MessagesRequest, engine: AsyncEngine) -> _Answer:
    try:
        turn = await prepare_turn(
            _chat(body), engine, prefix="msg_", answer_id=body.answer_id, created=body.answer_created
        )
    except RequestError as error:
        raise in_words_of_messages(error) from None
    return _Answer(turn, body)


def _chat(body: CountTokensRequest) -> ChatCompletionRequest:
    try:
        return body.chat()
    except InvalidBody as error:
        raise ApiError(400, error.message, param=error.param, code="invalid_body") from None


class _Answer:
    """A turn in the shape of Messages."""

    def __init__(self, turn: ChatTurn, body: MessagesRequest) -> None:
        self.headers = turn.headers
        self._turn = turn
        turn.reads_in_order = True
        self._max_tokens = body.max_tokens
        self._shows_thinking = body.shows_thinking
        self._writer = EventWriter(notes=bool(body.return_token_ids))

    async def whole(self, timer: RequestTimer) -> MessageAnswer:
        turn = self._turn
        content = BlockList(turn.id_of, shows_thinking=self._shows_thinking)

        def take(delta: OutputDelta) -> bool:
            piece = turn.read(delta, timer)
            if piece.is_written:
                content.add(piece.steps)
            return True

        async with aclosing(turn.run(take)) as deltas:
            async for delta in deltas:
                take(delta)
        turn.finish(timer)
        answer = self._opened()
        answer.content = content.blocks()
        stop = self._stop()
        answer.stop_reason, answer.stop_sequence = stop.stop_reason, stop.stop_sequence
        answer.usage = MessageUsage.of(turn.usage.usage())
        return answer

    async def events(self, timer: RequestTimer, socket: SocketWriter) -> AsyncGenerator[bytes, None]:
        turn, writer = self._turn, self._writer
        content = BlockEvents(writer, turn.id_of, shows_thinking=self._shows_thinking)
        opened = False

        def take(delta: OutputDelta) -> bool:
            if not (opened and socket.ready):
                return False
            if turn.is_parsed or content.text is None:
                content.add(turn.read(delta, timer).steps)
            else:
                # Not counted here: the last delta says how many tokens there were.
                timer.delta(delta)
                if delta.text:
                    writer.add_text(content.text, delta.text)
            if delta.token_ids:
                writer.tokens(delta.token_ids)
            if data := writer.take():
                socket.write(data)
            return True

        async with aclosing(turn.run(take)) as deltas:
            async for delta in deltas:
                piece = turn.read(delta, timer)
                if not opened:
                    opened = True
                    writer.add(MessageStart(message=self._opened()))
                    writer.add(Ping())
                    writer.tokens(())
                with writer.muted():
                    content.add(piece.earlier)
                content.add(piece.steps)
                if piece.is_written and delta.token_ids:
                    writer.tokens(delta.token_ids)
                if data := writer.take():
                    yield data
        turn.finish(timer)
        content.close()
        usage = turn.usage.usage()
        writer.add(MessageDelta(delta=self._stop(), usage=MessageUsage.of(usage)))
        yield writer.close(MessageStop(), usage)

    def ending(self) -> bytes:
        """Nothing: the last event ends the stream."""
        return b""

    def failing(self, error: ApiError) -> bytes:
        return self._writer.fail(error, ErrorEvent.of(error.status, error.message, error.code))

    def _opened(self) -> MessageAnswer:
        """The message before it has content."""
        turn = self._turn
        return MessageAnswer(
            id=f"msg_{turn.id_of('message')}",
            model=turn.engine.served_name,
            content=[],
            stop_reason=None,
            usage=MessageUsage.of(turn.usage.usage(), output_tokens=0),
        )

    def _stop(self) -> Stop:
        (choice,) = self._turn.choices
        last = choice.last
        assert last is not None
        match self._turn.finish_reason(choice):
            case "tool_calls":
                return Stop(stop_reason="tool_use")
            case "length" if last.num_output_tokens < self._max_tokens:
                return Stop(stop_reason="model_context_window_exceeded")
            case "length":
                return Stop(stop_reason="max_tokens")
        if isinstance(last.stop_reason, str):
            return Stop(stop_reason="stop_sequence", stop_sequence=last.stop_reason)
        return Stop(stop_reason="end_turn")
