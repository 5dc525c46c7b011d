"""`POST /v1/chat/completions`: a turn as an answer, or as chunks.

A streamed choice is: a chunk with the role, then content and parts of tool calls as they become final, the
last of them with the finish reason; then, if asked for, one chunk with the usage of the whole request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request
from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.frontend.reasoning import Field
from leadline.engine.frontend.tool_formats import CallDelta
from leadline.engine.messages import TokenLogprobs
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.api.generation import ChunkStream, StreamUsage, answered, matched_stop
from leadline.engine.server.api.logprobs import chat_logprobs, prompt_logprobs
from leadline.engine.server.api.turn import ChatTurn, Piece, TurnChoice, prepare_turn
from leadline.engine.server.http.responses import sse
from leadline.engine.server.http.socket_writer import EventTemplate, SocketWriter
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.engine.server.state import ServerState
from leadline.protocol.openai.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
    FunctionCallDelta,
    PromptLogprob,
    ToolCallDelta,
)
from leadline.protocol.openai.chat import ChatCompletionRequest, FunctionCall, ToolCall

__all__ = ["create"]


async def create(request: Request, state: ServerState) -> Response:
    return await answered(request, state, ChatCompletionRequest, "chat", _prepare)


async def _prepare(body: ChatCompletionRequest, engine: AsyncEngine) -> _Answer:
    return _Answer(await prepare_turn(body, engine))


@dataclass(slots=True)
class _Collected:
    """What a choice of a whole answer has been given so far."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _Answer(ChunkStream):
    """A turn in the shape of chat completions."""

    def __init__(self, turn: ChatTurn) -> None:
        self.headers = turn.headers
        self._turn = turn
        self._body = turn.body
        self._model = turn.engine.served_name

    async def whole(self, timer: RequestTimer) -> ChatCompletion:
        turn = self._turn
        collected = [_Collected() for _ in turn.choices]
        scored: list[TokenLogprobs] | None = None

        def take(delta: OutputDelta) -> bool:
            nonlocal scored
            piece = turn.read(delta, timer)
            scored = scored or delta.prompt_logprobs
            if piece.is_written:
                of_choice = collected[piece.index]
                of_choice.texts.append(piece.parsed.content)
                of_choice.thoughts.append(piece.parsed.reasoning)
                of_choice.token_ids += delta.token_ids
                of_choice.logprobs += delta.logprobs or []
            return True

        async with aclosing(turn.run(take)) as deltas:
            async for delta in deltas:
                take(delta)
        turn.finish(timer)
        return ChatCompletion(
            id=turn.id,
            created=turn.created,
            model=self._model,
            choices=[
                self._finished(index, choice, collected[index]) for index, choice in enumerate(turn.choices)
            ],
            usage=turn.usage.usage(),
            prompt_token_ids=turn.prompt_token_ids if self._body.shows_prompt_ids else None,
            prompt_logprobs=self._prompt_logprobs(scored),
        )

    async def events(self, timer: RequestTimer, socket: SocketWriter) -> AsyncGenerator[bytes, None]:
        turn = self._turn
        shows_prompt, begins = self._body.shows_prompt_ids, True
        options = StreamUsage.of(self._body.stream_options)
        envelope = ChatCompletionChunk(
            id=turn.id,
            created=turn.created,
            model=self._model,
            choices=[],
            usage=None if options.at_end else UNSET,
        )
        templates = {} if options.in_every_chunk else self._templates(envelope)
        wants_ids = bool(self._body.return_token_ids)

        def take(delta: OutputDelta) -> bool:
            if not templates or not socket.ready or turn.choices[delta.index].last is None:
                return False
            if (name := turn.plain_field(delta)) is None:
                return False
            # Not counted here: the choice's last delta says how many tokens there were.
            timer.delta(delta)
            if delta.text or wants_ids:
                socket.write(templates[name, delta.index].event(delta.text, delta.token_ids))
            return True

        async with aclosing(turn.run(take)) as deltas:
            async for delta in deltas:
                piece = turn.read(delta, timer)
                if not piece.is_written:
                    continue
                for part in self._chunks(piece):
                    envelope.choices = [part]
                    if options.in_every_chunk:
                        envelope.usage = turn.usage.usage(no_output=begins)
                    begins = False
                    if shows_prompt:
                        yield sse(replace(envelope, prompt_token_ids=turn.prompt_token_ids))
                        shows_prompt = False
                    else:
                        yield sse(envelope)
        turn.finish(timer)
        if options.at_end:
            envelope.choices, envelope.usage = [], turn.usage.usage()
            yield sse(envelope)

    def _templates(self, envelope: ChatCompletionChunk) -> dict[tuple[Field, int], EventTemplate]:
        """Return templates of the chunk that has only text of one field (and its token ids), for each choice;
        none where there is more."""
        body, turn, text = self._body, self._turn, EventTemplate.TEXT
        if turn.may_call or body.logprobs:
            return {}
        deltas: dict[Field, ChatDelta] = {"content": ChatDelta(content=text)}
        if turn.is_parsed:
            deltas["reasoning"] = ChatDelta(reasoning_content=text, reasoning=text)
        templates = {}
        for index in range(len(turn.choices)):
            for name, delta in deltas.items():
                chunk = ChatChunkChoice(index=index, delta=delta)
                if body.return_token_ids:
                    chunk.token_ids = EventTemplate.IDS
                places = 2 if name == "reasoning" else 1
                templates[name, index] = EventTemplate(replace(envelope, choices=[chunk]), places)
        return templates

    def _finished(self, index: int, choice: TurnChoice, collected: _Collected) -> ChatChoice:
        assert choice.last is not None
        text, thought = self._turn.echoed + "".join(collected.texts), "".join(collected.thoughts)
        message = ChatResponseMessage(content=text if text or not (choice.calls or thought) else None)
        if thought:
            message.reasoning_content = message.reasoning = thought
        if choice.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in choice.calls
            ]
        result = ChatChoice(index=index, message=message, finish_reason=self._turn.finish_reason(choice))
        result.logprobs = self._logprobs(collected.logprobs)
        result.stop_reason, result.matched_stop = choice.last.stop_reason, matched_stop(choice.last)
        if self._body.return_token_ids:
            result.token_ids = collected.token_ids
        return result

    def _chunks(self, piece: Piece) -> Iterator[ChatChunkChoice]:
        index, parsed, delta = piece.index, piece.parsed, piece.delta
        if piece.first:
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=self._turn.echoed))
        logprobs = self._logprobs(delta.logprobs or [])
        wants_ids = bool(self._body.return_token_ids) and bool(delta.token_ids)
        says = parsed.content or parsed.reasoning or parsed.calls
        ends = delta.finish_reason is not None
        brings = says or wants_ids or (logprobs is not None and bool(logprobs.content))
        if not (brings or ends):
            return
        # One chunk for all that a token brings: then its id is there exactly if that is.
        chunk = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs if brings else None)
        if parsed.content or (brings and not says):
            chunk.delta.content = parsed.content
        if parsed.reasoning:
            chunk.delta.reasoning_content = chunk.delta.reasoning = parsed.reasoning
        if parsed.calls:
            chunk.delta.tool_calls = [_call_delta(part) for part in parsed.calls]
        if wants_ids:
            chunk.token_ids = delta.token_ids
        if ends:
            chunk.finish_reason = self._turn.finish_reason(self._turn.choices[index])
            if delta.stop_reason is not None:
                chunk.stop_reason = delta.stop_reason
            chunk.matched_stop = matched_stop(delta)
        yield chunk

    def _prompt_logprobs(
        self, entries: list[TokenLogprobs] | None
    ) -> list[dict[int, PromptLogprob] | None] | None:
        asked = self._turn.sampling.prompt_logprobs
        return None if asked is None else prompt_logprobs(entries or [], asked, self._turn.engine.tokenizer)

    def _logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            entries,
            self._turn.sampling.logprobs or 0,
            self._turn.engine.tokenizer,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )


def _call_delta(part: CallDelta) -> ToolCallDelta:
    function = FunctionCallDelta(name=part.name, arguments=part.arguments)
    return ToolCallDelta(
        index=part.index, id=part.id, type=None if part.id is None else "function", function=function
    )
