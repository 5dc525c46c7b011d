"""One turn of a chat: a request that is ready to run, and its output as parsed pieces.

Every API that answers chats (chat completions, Responses, Messages) runs its requests as turns. The API's own
module writes the pieces in its own shape.

    request ─▶ prepare_turn ─▶ ChatTurn.run ─▶ OutputDelta ─▶ ChatTurn.read ─▶ Piece ─▶ the API's events
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
from leadline.engine.frontend.reasoning import Begins, Field, OutputParser, ReasoningFormat, Thought
from leadline.engine.frontend.tool_formats import (
    CallParser,
    NamedCallParser,
    ParsedText,
    RequiredCallParser,
)
from leadline.engine.frontend.tool_formats import ToolCall as ParsedCall
from leadline.engine.frontend.tool_schema import (
    ToolPlan,
    calls_in_text,
    known_format,
    or_calls,
    plan_tools,
)
from leadline.engine.messages import CoreRequest, ThoughtSpec
from leadline.engine.outputs import OutputDelta
from leadline.engine.sampling_params import SamplingParams
from leadline.engine.server.api.generation import UsageCounter, created_now, finish_of, finish_reason, new_id
from leadline.engine.server.api.params import (
    chat_sampling,
    check_sequences,
    extras,
    in_words_of_chat,
    prompts_of,
    thinking_budget,
)
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.protocol.openai.chat import AssistantMessage, ChatCompletionRequest, ChatMessage, TextPart
from leadline.protocol.openai.common import FinishReason

__all__ = ["ChatTurn", "Piece", "TurnChoice", "prepare_turn"]

logger = logging.getLogger("leadline.engine.server")

_MOST_NAMED = 8
"""Of what is skipped, in a header."""
_END_TOKENS = 64
"""Of a prompt: they tell whether it ends inside a thought."""


@dataclass(slots=True)
class TurnChoice:
    """The state of one choice: its parser, its calls and its last delta."""

    parser: OutputParser | None
    thought: Thought | None = None
    """Counts the tokens of thoughts, where tags are tokens."""
    reasoning_tokens: int = 0
    calls: list[ParsedCall] = field(default_factory=list)
    """All calls so far, those of an earlier attempt included."""
    last: OutputDelta | None = None

    @property
    def is_thinking(self) -> bool:
        """Whether the text parsed last is of a thought."""
        return self.parser is not None and self.parser.thinking


@dataclass(slots=True)
class Piece:
    """What one delta brings to its choice."""

    index: int
    """Of the choice."""
    steps: list[ParsedText]
    """New output. Where the turn is read in order (`ChatTurn.reads_in_order`), in steps so small that their
    order is that of the output; otherwise one step."""
    earlier: list[ParsedText]
    """Output that the client already has from an earlier attempt on another pod, in small steps. It changes
    the writer's state but is not written again."""
    delta: OutputDelta
    first: bool
    """Whether this is the first piece of its choice that is written."""

    @property
    def parsed(self) -> ParsedText:
        """All new output in one."""
        if len(self.steps) == 1:
            return self.steps[0]
        content = "".join(step.content for step in self.steps)
        reasoning = "".join(step.reasoning for step in self.steps)
        return ParsedText(content, [part for step in self.steps for part in step.calls], reasoning)

    @property
    def is_written(self) -> bool:
        """Whether the piece brings anything new."""
        return not self.delta.resumed or self.delta.finish_reason is not None


async def prepare_turn(
    body: ChatCompletionRequest,
    engine: AsyncEngine,
    *,
    prefix: str = "chatcmpl-",
    answer_id: str | None = None,
    created: int | None = None,
) -> ChatTurn:
    """Return the turn that answers `body`. Raises RequestError.

    `prefix` begins the ids of its answer. `answer_id` and `created` (seconds since the Unix epoch) are those
    of an answer that another pod began.
    """
    plan = plan_tools(
        msgspec.to_builtins(body.tools) if body.tools else None,
        msgspec.to_builtins(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    given = chat_sampling(body, plan.constraint)
    reasoning = engine.reasoning
    if reasoning is not None and reasoning.hidden:
        given.setdefault("skip_special_tokens", False)
    if (tool_format := known_format(plan, engine.tool_format)) is not None:
        if tool_format.is_hidden(engine.tokenizer):
            given.setdefault("skip_special_tokens", False)
        if "structured" in given:
            given["structured"] = or_calls(given["structured"], plan, tool_format, engine.tokenizer)
        else:
            given["structured"] = calls_in_text(plan, tool_format, engine.tokenizer)
    if engine.constraints is not None and (constraint := engine.constraints.constrain(body)) is not None:
        given["structured"] = constraint
    sampling = engine.builder.sampling_params(given)
    check_sequences(1, sampling.n, engine.config)
    (prompt,) = await prompts_of(body, engine)
    structured = sampling.structured is not None
    in_text = structured and plan.is_free and sampling.structured.param == "tools"
    thinking = _thinking(
        body, engine, prompt.content, structured=structured, in_text=in_text, free=plan.is_free
    )
    try:
        request = await engine.prepare(
            prompt.content,
            sampling,
            request_id=new_id(prefix),
            add_special_tokens=prompt.add_special_tokens,
            thought=None if thinking is None else thinking.followed,
            **extras(body),
        )
    except RequestError as error:
        raise in_words_of_chat(error) from None
    answer_id = answer_id or request.request_id
    return ChatTurn(body, engine, plan, thinking, request, answer_id, created or created_now())


class ChatTurn:
    """A chat request that is ready to run.

    Attributes:
        body: the request.
        id, created: of the answer.
        choices: one for each of the request's `n`.
        usage: tokens so far.
        headers: what the answer's headers say beside the usual.
        reads_in_order: the API shows in which order text and calls came. Set before the first `read`.
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        engine: AsyncEngine,
        plan: ToolPlan,
        thinking: _Thinking | None,
        request: CoreRequest,
        answer_id: str,
        created: int,
    ) -> None:
        self.body = body
        self.engine = engine
        self.id = answer_id
        self.created = created
        self.headers = _skipped(body)
        self.usage = UsageCounter()
        self.reads_in_order = False
        self._plan = plan
        self._thinking = thinking
        self._request = request
        self.choices = [self._new_choice(index) for index in range(request.sampling.n)]
        if engine.reasoning is not None:
            self.usage.reasoning_tokens = {}

    @property
    def prompt_token_ids(self) -> list[int]:
        """Of the prompt, without output of an earlier attempt."""
        request = self._request
        return request.prompt_token_ids[: len(request.prompt_token_ids) - request.num_resumed]

    @property
    def echoed(self) -> str:
        """The text that the answer repeats: that of the last message, with `echo`. An earlier attempt has
        repeated it."""
        last = self.body.messages[-1]
        wanted = self.body.echo and isinstance(last, AssistantMessage) and not self._request.num_resumed
        return _text_of(last) if wanted else ""

    @property
    def sampling(self) -> SamplingParams:
        """How the answer is sampled: as the request says, else as the model's authors recommend."""
        return self._request.sampling

    @property
    def is_parsed(self) -> bool:
        """Whether the text of deltas goes through a parser."""
        return self._plan.parse or self._thinking is not None

    @property
    def may_call(self) -> bool:
        """Whether the output may hold calls of tools."""
        return self._plan.parse

    def plain_field(self, delta: OutputDelta) -> Field | None:
        """Return the field to which the text of a delta goes as it is, in the middle of a choice; then `read`
        need not see the delta. None where it must."""
        choice = self.choices[delta.index]
        if choice.parser is None:
            return "content"
        field = choice.parser.plain(delta.text)
        if field == "reasoning":
            if self.body.include_reasoning is False:
                return None
            self._count(choice, delta, thinking=True)
        return field

    def run(self, take: Callable[[OutputDelta], bool]) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all choices. Each is offered to `take` first, and is not yielded where that
        returns True."""
        return self.engine.run(self._request, take)

    def read(self, delta: OutputDelta, timer: RequestTimer) -> Piece:
        """Parse a delta and count it."""
        choice = self.choices[delta.index]
        first = choice.last is None
        thinking = choice.is_thinking
        steps, earlier = [ParsedText()], []
        if not delta.resumed:
            # A delta of one token is in order as it is.
            several = len(delta.token_ids) > 1 or bool(self.body.stop)
            steps = self._steps(choice, delta, self.reads_in_order and several)
        else:
            earlier = self._steps(choice, delta, True)
        self._count(choice, delta, thinking=thinking or choice.is_thinking)
        if delta.resumed:
            if delta.finish_reason is None:
                return Piece(delta.index, steps, earlier, delta, first)
            # The earlier attempt has given out all but the end.
            delta.text, delta.token_ids = "", []
        timer.delta(delta)
        self.usage.add(delta)
        choice.last = delta
        return Piece(delta.index, steps, earlier, delta, first)

    def finish_reason(self, choice: TurnChoice) -> FinishReason:
        """Why a choice ended: for its calls, unless it was cut short."""
        assert choice.last is not None
        reason = finish_reason(choice.last)
        return "tool_calls" if choice.calls and reason == "stop" else reason

    def finish(self, timer: RequestTimer) -> None:
        """Count the turn; all its choices have ended."""
        timer.finish(finish_of([choice.last for choice in self.choices]))

    def _new_choice(self, index: int) -> TurnChoice:
        calls, thinking = self._calls_parser(index), self._thinking
        if thinking is None:
            return TurnChoice(None if calls is None else OutputParser(None, calls))
        parser = OutputParser(thinking.form.parser(thinking.begins), calls)
        return TurnChoice(parser, None if thinking.spec is None else Thought(thinking.spec))

    def _calls_parser(self, index: int) -> CallParser | None:
        plan = self._plan
        if not plan.parse:
            return None
        parser: CallParser
        if (tool_format := known_format(plan, self.engine.tool_format)) is not None:
            parser = tool_format.parser(plan.tools or ())
        elif plan.named is not None:
            parser = NamedCallParser(plan.named)
        else:
            parser = RequiredCallParser(plan.names)
        # The same on every pod that works on this answer.
        parser.new_call_id = lambda number: "call_" + self.id_of(f"call/{index}/{number}")
        return parser

    def id_of(self, part: str) -> str:
        """Return 24 hexadecimal digits that name a part of this answer, the same on every pod."""
        return blake2b(f"{self.id}/{part}".encode(), digest_size=12).hexdigest()

    def _steps(self, choice: TurnChoice, delta: OutputDelta, in_order: bool) -> list[ParsedText]:
        """Parse a delta. `in_order`: by characters, so that what came of several tokens is in the order of
        the output."""
        texts: Sequence[str] = delta.text if in_order and choice.parser is not None else [delta.text]
        steps = [self._parse(choice, text, None) for text in texts]
        if delta.finish_reason is not None and choice.parser is not None:
            steps.append(self._parse(choice, "", delta.finish_reason))
        return steps

    def _parse(self, choice: TurnChoice, text: str, ended: object) -> ParsedText:
        """Parse more of a choice, and what was held back if it has `ended`."""
        parser = choice.parser
        if parser is None:
            return ParsedText(text)
        parsed = parser.push(text)
        if ended is not None:
            tail = parser.finish()
            parsed = ParsedText(
                parsed.content + tail.content, parsed.calls + tail.calls, parsed.reasoning + tail.reasoning
            )
        if self.body.include_reasoning is False:
            parsed.reasoning = ""
        if self.body.parallel_tool_calls is False:
            parsed.calls = [part for part in parsed.calls if part.index == 0]
        parsed.add_to(choice.calls)
        return parsed

    def _count(self, choice: TurnChoice, delta: OutputDelta, *, thinking: bool) -> None:
        """Count the delta's tokens of thoughts. `thinking`: its text is of one, where tags are not tokens."""
        if choice.thought is not None:
            if not choice.thought.answering:
                for token in delta.token_ids:
                    choice.thought.take(token)
            choice.reasoning_tokens = choice.thought.num_tokens
        elif thinking:
            choice.reasoning_tokens += len(delta.token_ids)
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens[delta.index] = choice.reasoning_tokens


@dataclass(frozen=True, slots=True)
class _Thinking:
    """What is known beforehand of a turn's thought."""

    form: ReasoningFormat
    begins: Begins
    spec: ThoughtSpec | None
    followed: ThoughtSpec | None
    """The same for the engine core, if it has to follow the thought."""


def _thinking(
    body: ChatCompletionRequest,
    engine: AsyncEngine,
    prompt: str | list[int],
    *,
    structured: bool,
    in_text: bool,
    free: bool,
) -> _Thinking | None:
    """None where the output is all answer. Raises RequestError.

    `structured`: a grammar constrains the output. `in_text`: it leaves text free until a call begins, and
    knows the messages of models that write messages. `free`: the model may call a tool instead.
    """
    reasoning = engine.reasoning
    if reasoning is None:
        return None
    if not isinstance(prompt, str):  # truncated
        prompt = engine.tokenizer.decode(prompt[-_END_TOKENS:])
    continued = _text_of(body.messages[-1]) if body.continue_final_message else None
    begins = reasoning.form.begins(prompt, continued)
    budget = thinking_budget(body, engine)
    spec = reasoning.spec(begins, budget)
    if spec is None and begins != "answer":
        if body.thinking_budget is not None and budget is not None:
            raise RequestError(
                f"thinking_budget needs a model that has one token for {reasoning.form.closing!r}, and this "
                "one has several; use max_tokens",
                param="thinking_budget",
            )
        if structured and not in_text:
            return None  # for the same reason the grammar holds from the first token on
    if spec is not None and free:
        spec = msgspec.structs.replace(spec, heading=())
    follows = spec is not None and (structured or budget is not None)
    if in_text and reasoning.form.answers:
        follows = False
    return _Thinking(reasoning.form, begins, spec, spec if follows else None)


def _text_of(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "".join(part.text for part in content if isinstance(part, TextPart))
    return content or ""


def _skipped(body: ChatCompletionRequest) -> dict[str, str]:
    """The header that names the tools that were left out, and fields without effect."""
    if not body.skipped:
        return {}
    text = ", ".join(body.skipped[:_MOST_NAMED])
    logger.info("tools of a type that models here cannot call, or fields, are skipped: %s", text)
    return {"X-Leadline-Skipped": text}
