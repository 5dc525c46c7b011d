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

from leadline.engine.async_engine import AsyncEngine
from leadline.engine.errors import RequestError
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
from leadline.engine.messages import CoreRequest
from leadline.engine.outputs import OutputDelta
from leadline.engine.sampling_params import SamplingParams
from leadline.engine.server.generation import UsageCounter, created_now, finish_of, finish_reason, new_id
from leadline.engine.server.metrics import RequestTimer
from leadline.engine.server.params import chat_sampling, check_sequences, extras, in_words_of_chat
from leadline.engine.server.prompts import prompts_of
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.common import FinishReason

__all__ = ["ChatTurn", "Piece", "TurnChoice", "prepare_turn"]

logger = logging.getLogger("leadline.engine.server")

_MOST_NAMED = 8
"""Of skipped tools, in a header."""


@dataclass(slots=True)
class TurnChoice:
    """The state of one choice: its parser, its calls and its last delta."""

    parser: CallParser | None
    calls: list[ParsedCall] = field(default_factory=list)
    """All calls so far, those of an earlier attempt included."""
    last: OutputDelta | None = None


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
    if (tool_format := known_format(plan, engine.tool_format)) is not None:
        if tool_format.is_hidden(engine.tokenizer):
            given.setdefault("skip_special_tokens", False)
        if "structured" in given:
            given["structured"] = or_calls(given["structured"], plan, tool_format, engine.tokenizer)
        else:
            given["structured"] = calls_in_text(plan, tool_format, engine.tokenizer)
    sampling = engine.builder.sampling_params(given)
    check_sequences(1, sampling.n, engine.config)
    (prompt,) = await prompts_of(body, engine)
    try:
        request = await engine.prepare(
            prompt.content,
            sampling,
            request_id=new_id(prefix),
            add_special_tokens=prompt.add_special_tokens,
            **extras(body),
        )
    except RequestError as error:
        raise in_words_of_chat(error) from None
    return ChatTurn(body, engine, plan, request, answer_id or request.request_id, created or created_now())


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
        self._request = request
        self.choices = [TurnChoice(self._parser(index)) for index in range(request.sampling.n)]

    @property
    def sampling(self) -> SamplingParams:
        """How the answer is sampled: as the request says, else as the model's authors recommend."""
        return self._request.sampling

    @property
    def is_parsed(self) -> bool:
        """Whether the text of deltas goes through a parser."""
        return self._plan.parse

    def run(self, take: Callable[[OutputDelta], bool]) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of all choices. Each is offered to `take` first, and is not yielded where that
        returns True."""
        return self.engine.run(self._request, take)

    def read(self, delta: OutputDelta, timer: RequestTimer) -> Piece:
        """Parse a delta and count it."""
        choice = self.choices[delta.index]
        first = choice.last is None
        steps, earlier = [ParsedText()], []
        if not delta.resumed:
            # A delta of one token is in order as it is.
            several = len(delta.token_ids) > 1 or bool(self.body.stop)
            steps = self._steps(choice, delta, self.reads_in_order and several)
        else:
            earlier = self._steps(choice, delta, True)
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

    def _parser(self, index: int) -> CallParser | None:
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
            parsed = ParsedText(parsed.content + tail.content, parsed.calls + tail.calls)
        if self.body.parallel_tool_calls is False:
            parsed.calls = [part for part in parsed.calls if part.index == 0]
        parsed.add_to(choice.calls)
        return parsed


def _skipped(body: ChatCompletionRequest) -> dict[str, str]:
    """The header that names the tools that were left out."""
    if not body.skipped_tools:
        return {}
    text = ", ".join(body.skipped_tools[:_MOST_NAMED])
    logger.info("tools of a type that models here cannot call are skipped: %s", text)
    return {"X-Leadline-Skipped": text}
