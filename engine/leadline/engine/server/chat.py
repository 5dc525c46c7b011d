"""`POST /v1/chat/completions`: template, tools, n choices, streaming.

A streamed choice is: a chunk with the role, content and parts of tool calls as they become final, a chunk
with the finish reason; then, if asked for, one chunk with the usage of the whole request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from fastapi import Request
from msgspec import UNSET
from starlette.responses import Response

from leadline.engine.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.frontend.tool_formats import (
    CallDelta,
    CallParser,
    NamedCallParser,
    ParsedText,
    RequiredCallParser,
    ToolFormat,
    detect_format,
)
from leadline.engine.frontend.tool_formats import ToolCall as ParsedCall
from leadline.engine.frontend.tool_schema import ToolPlan, or_calls, plan_tools
from leadline.engine.messages import CoreRequest, TokenLogprobs
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.generation import (
    StreamUsage,
    UsageCounter,
    answered,
    created_now,
    finish_of,
    finish_reason,
    new_id,
)
from leadline.engine.server.http import sse
from leadline.engine.server.logprobs import chat_logprobs
from leadline.engine.server.metrics import RequestTimer
from leadline.engine.server.outlet import EventTemplate, Outlet
from leadline.engine.server.params import chat_sampling, check_sequences, extras, in_words_of_chat
from leadline.engine.server.prompts import prompts_of
from leadline.engine.server.state import ServerState
from leadline.protocol.openai.chat import ChatCompletionRequest, FunctionCall, ToolCall
from leadline.protocol.openai.common import FinishReason
from leadline.protocol.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
    FunctionCallDelta,
    ToolCallDelta,
)

__all__ = ["create"]

logger = logging.getLogger("leadline.engine.server")

_MOST_NAMED = 8
"""Of skipped tools, in a header."""


async def create(request: Request, state: ServerState) -> Response:
    return await answered(request, state, ChatCompletionRequest, "chat", _prepare)


async def _prepare(body: ChatCompletionRequest, engine: AsyncEngine) -> _Answer:
    plan = plan_tools(
        msgspec.to_builtins(body.tools) if body.tools else None,
        msgspec.to_builtins(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    given = chat_sampling(body, plan.constraint)
    if plan.parse and plan.constraint is None and _tool_format(engine).is_hidden(engine.tokenizer):
        given.setdefault("skip_special_tokens", False)
    if plan.parse and plan.constraint is None and "structured" in given:
        given["structured"] = or_calls(
            given["structured"],
            plan.names,
            _tool_format(engine),
            engine.tokenizer,
            parallel=body.parallel_tool_calls is not False,
        )
    sampling = engine.builder.sampling_params(given)
    check_sequences(1, sampling.n, engine.config)
    (prompt,) = await prompts_of(body, engine)
    try:
        request = await engine.prepare(
            prompt.content,
            sampling,
            request_id=new_id("chatcmpl"),
            add_special_tokens=prompt.add_special_tokens,
            **extras(body),
        )
    except RequestError as error:
        raise in_words_of_chat(error) from None
    return _Answer(body, engine, plan, request)


@dataclass(slots=True)
class _Choice:
    parser: CallParser | None
    texts: list[str] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)
    """Those of an earlier attempt included."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: OutputDelta | None = None


class _Answer:
    """One HTTP request: how the deltas of its choices become an answer or chunks of one."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        engine: AsyncEngine,
        plan: ToolPlan,
        request: CoreRequest,
    ) -> None:
        self.headers = _skipped(body)
        self._body = body
        self._engine = engine
        self._plan = plan
        self._request = request
        self._id = request.request_id
        self._created = created_now()
        self._usage = UsageCounter()
        self._choices = [_Choice(self._parser()) for _ in range(request.sampling.n)]

    async def whole(self, timer: RequestTimer) -> ChatCompletion:
        def take(delta: OutputDelta) -> bool:
            choice = self._choices[delta.index]
            if delta.resumed and not self._catch_up(choice, delta):
                return True
            self._observe(delta, timer)
            parsed = self._parse(choice, delta)
            choice.texts.append(parsed.content)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or []
            return True

        async with aclosing(self._engine.run(self._request, take)) as deltas:
            async for delta in deltas:
                take(delta)
        timer.finish(finish_of([choice.last for choice in self._choices]))
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._engine.served_name,
            choices=[self._finished(index, choice) for index, choice in enumerate(self._choices)],
            usage=self._usage.usage(),
        )

    async def events(self, timer: RequestTimer, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        options = StreamUsage.of(self._body.stream_options)
        envelope = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._engine.served_name,
            choices=[],
            usage=None if options.at_end else UNSET,
        )
        templates = [] if options.in_every_chunk else self._templates(envelope)
        wants_ids = bool(self._body.return_token_ids)

        def take(delta: OutputDelta) -> bool:
            if not templates or not outlet.ready or self._choices[delta.index].last is None:
                return False
            # Nor is it counted: the choice's last delta says how many tokens there were.
            timer.delta(delta)
            if delta.text or wants_ids:
                outlet.write(templates[delta.index].event(delta.text, delta.token_ids))
            return True

        async with aclosing(self._engine.run(self._request, take)) as deltas:
            async for delta in deltas:
                choice = self._choices[delta.index]
                if delta.resumed and not self._catch_up(choice, delta):
                    continue
                first = choice.last is None
                self._observe(delta, timer)
                if options.in_every_chunk:
                    envelope.usage = self._usage.usage()
                for part in self._chunks(delta, first):
                    envelope.choices = [part]
                    yield sse(envelope)
        timer.finish(finish_of([choice.last for choice in self._choices]))
        if options.at_end:
            envelope.choices, envelope.usage = [], self._usage.usage()
            yield sse(envelope)

    def _templates(self, envelope: ChatCompletionChunk) -> list[EventTemplate]:
        """Of the chunk that brings text (and its token ids) and nothing else, for each choice; none where
        there is more."""
        body = self._body
        if self._plan.parse or body.logprobs:
            return []
        delta = ChatDelta(content=EventTemplate.TEXT)
        templates = []
        for index in range(len(self._choices)):
            chunk = ChatChunkChoice(index=index, delta=delta)
            if body.return_token_ids:
                chunk.token_ids = EventTemplate.IDS
            templates.append(EventTemplate(msgspec.structs.replace(envelope, choices=[chunk])))
        return templates

    def _observe(self, delta: OutputDelta, timer: RequestTimer) -> None:
        timer.delta(delta)
        self._usage.add(delta)
        self._choices[delta.index].last = delta

    def _catch_up(self, choice: _Choice, delta: OutputDelta) -> bool:
        """Parse what an earlier attempt gave out, which is not given out again; return whether the choice is
        over with it."""
        self._parse(choice, delta)
        delta.text, delta.token_ids = "", []
        if delta.finish_reason is None:
            return False
        choice.parser = None  # what it held back was given out at the end of the earlier attempt
        return True

    def _parser(self) -> CallParser | None:
        plan = self._plan
        if not plan.parse:
            return None
        if plan.constraint is None:
            return _tool_format(self._engine).parser(plan.tools or ())
        return NamedCallParser(plan.named) if plan.named is not None else RequiredCallParser(plan.names)

    def _parse(self, choice: _Choice, delta: OutputDelta) -> ParsedText:
        """The content of a delta, and the parts of calls in it."""
        parser = choice.parser
        if parser is None:
            return ParsedText(delta.text)
        parsed = parser.push(delta.text)
        if delta.finish_reason is not None:
            tail = parser.finish()
            parsed = ParsedText(parsed.content + tail.content, parsed.calls + tail.calls)
        if self._body.parallel_tool_calls is False:
            parsed.calls = [part for part in parsed.calls if part.index == 0]
        parsed.add_to(choice.calls)
        return parsed

    def _finished(self, index: int, choice: _Choice) -> ChatChoice:
        assert choice.last is not None
        text = "".join(choice.texts)
        message = ChatResponseMessage(content=text if text or not choice.calls else None)
        if choice.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in choice.calls
            ]
        result = ChatChoice(index=index, message=message, finish_reason=_finish(choice, choice.last))
        result.logprobs = self._logprobs(choice.logprobs)
        if choice.last.stop_reason is not None:
            result.stop_reason = choice.last.stop_reason
        if self._body.return_token_ids:
            result.token_ids = choice.token_ids
        return result

    def _chunks(self, delta: OutputDelta, first: bool) -> Iterator[ChatChunkChoice]:
        choice, index = self._choices[delta.index], delta.index
        parsed = self._parse(choice, delta)
        if first:
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        logprobs = self._logprobs(delta.logprobs or [])
        wants_ids = bool(self._body.return_token_ids) and bool(delta.token_ids)
        if parsed.content or parsed.calls or wants_ids or (logprobs is not None and logprobs.content):
            chunk = ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs)
            # One chunk for all that a token brings: then its id is there exactly if that is.
            if parsed.content or not parsed.calls:
                chunk.delta.content = parsed.content
            if parsed.calls:
                chunk.delta.tool_calls = [_call_delta(part) for part in parsed.calls]
            if wants_ids:
                chunk.token_ids = delta.token_ids
            yield chunk
        if delta.finish_reason is not None:
            last = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=_finish(choice, delta))
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            yield last

    def _logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(entries, self._body.top_logprobs or 0, self._engine.tokenizer)


def _call_delta(part: CallDelta) -> ToolCallDelta:
    function = FunctionCallDelta(name=part.name, arguments=part.arguments)
    return ToolCallDelta(
        index=part.index, id=part.id, type=None if part.id is None else "function", function=function
    )


def _skipped(body: ChatCompletionRequest) -> dict[str, str]:
    """Tools that were left out, for the client's eyes."""
    if not body.skipped_tools:
        return {}
    text = ", ".join(body.skipped_tools[:_MOST_NAMED])
    logger.info("tools of a type that models here cannot call are skipped: %s", text)
    return {"X-Leadline-Skipped": text}


def _tool_format(engine: AsyncEngine) -> ToolFormat:
    return detect_format(engine.renderer.source_for(tools=True), engine.model_config.family)


def _finish(choice: _Choice, last: OutputDelta) -> FinishReason:
    """A choice that made calls ended for them, unless it was cut short."""
    reason = finish_reason(last)
    return "tool_calls" if choice.calls and reason == "stop" else reason
