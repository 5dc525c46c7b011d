"""Requests of `POST /v1/messages` and `POST /v1/messages/count_tokens`, and the chat that each stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.anthropic.content import Message, TextBlock
from leadline.protocol.anthropic.conversation import chat_messages
from leadline.protocol.openai.body import InvalidBody
from leadline.protocol.openai.chat import (
    ChatCompletionRequest,
    Function,
    FunctionName,
    NamedToolChoice,
    ToolChoice,
)
from leadline.protocol.openai.chat import Tool as ChatTool
from leadline.protocol.openai.common import (
    BadWords,
    LogitBias,
    NonEmptyStr,
    Nothing,
    Penalty,
    PositiveInt,
    PriorityClass,
    StopList,
    TokenId,
    TokenIds,
)
from leadline.protocol.openai.constraints import JsonSchema, JsonSchemaFormat, constraint_of
from leadline.protocol.openai.other_servers import NOT_OF_OURS, OtherServersFields

__all__ = ["CountTokensRequest", "MessagesRequest", "MessagesTool"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a skipped tool: fit for a header and a log."""


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool with an `input_schema`. A tool of another type may have none: Anthropic runs it, or its models
    were trained on it. Such a tool is skipped."""

    name: NonEmptyStr | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """JSON Schema of the input."""
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    @property
    def is_skipped(self) -> bool:
        return self.type not in (None, "custom") and self.input_schema is None


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto", kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag_field="type", tag="any", kw_only=True):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, tag_field="type", tag="tool", kw_only=True):
    name: NonEmptyStr
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag_field="type", tag="none", kw_only=True):
    pass


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled", kw_only=True):
    budget_tokens: PositiveInt
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive", kw_only=True):
    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled", kw_only=True):
    pass


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class OutputFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingTurns(msgspec.Struct, tag_field="type", tag="thinking_turns", kw_only=True):
    value: PositiveInt


class ClearThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015", kw_only=True):
    """Leave out the thoughts of all turns but the last ones."""

    keep: Literal["all"] | ThinkingTurns | None = None

    @property
    def turns(self) -> int | None:
        """How many turns keep their thoughts; None: all."""
        if self.keep == "all":
            return None
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else 1


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[ClearThinking] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


_OF_CHATS = {
    "n": "send the request again with another seed",
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
    "response_format": "use output_config.format",
    "structured_outputs": "use output_config.format, regex or grammar",
    "guided_json": "use output_config.format",
    "guided_regex": "use regex",
    "guided_choice": "use grammar",
    "guided_grammar": "use grammar",
    "reasoning_effort": "use thinking or output_config.effort",
    "logprobs": "use /v1/chat/completions",
    "functions": "use tools",
    "truncate_prompt_tokens": "send fewer messages",
}
"""Fields of chats, and their names here."""
_NOT_SUPPORTED = {
    **NOT_OF_OURS,
    **_OF_CHATS,
    "container": "nothing is stored or run here",
    "mcp_servers": "list the tools of these servers in tools, and call them yourself",
    "inference_geo": "choose the server's address by its place",
    "thread": "send all messages",
    "compaction": "shorten the messages yourself",
    "fallbacks": "send the request again with another model",
}
"""Fields that would change the answer, and what there is instead."""


class CountTokensRequest(OtherServersFields, kw_only=True):
    """What a prompt is made from."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    """Served name; null or absent: the only model there is."""
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of output_config.format, which wins when both are given."""
    context_management: ContextManagement | None = None

    # Extension: how the chat template is applied.
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template. They win over those that `thinking` and `output_config` set."""

    container: None = None
    mcp_servers: Nothing | None = None
    inference_geo: None = None
    thread: None = None
    compaction: None = None
    fallbacks: Nothing | None = None
    n: Literal[1] | None = None
    stop: Nothing | None = None
    max_completion_tokens: None = None
    response_format: None = None
    structured_outputs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    reasoning_effort: None = None
    logprobs: Literal[False] | None = None
    functions: None = None
    truncate_prompt_tokens: None = None

    not_supported: ClassVar[Mapping[str, str]] = _NOT_SUPPORTED

    def chat(self) -> ChatCompletionRequest:
        """Return the chat that this request stands for. Raises InvalidBody naming the field."""
        conversation = chat_messages(self.system, self.messages, thinking_turns=self._thinking_turns())
        tools, skipped = self._tools()
        choice = self._tool_choice(tools, skipped)
        chat = ChatCompletionRequest(
            model=self.model,
            messages=conversation.messages,
            tools=list(tools) or None,
            tool_choice=choice,
            chat_template_kwargs=self._template_kwargs() or None,
        )
        chat.__dict__["skipped"] = (*skipped, *self.skipped_fields)
        if isinstance(self.thinking, ThinkingEnabled):
            chat.thinking_budget = self.thinking.budget_tokens
        elif isinstance(self.thinking, ThinkingDisabled):
            chat.reasoning_effort = "none"
        if conversation.continues:
            chat.continue_final_message = True
        if getattr(self.tool_choice, "disable_parallel_tool_use", None):
            chat.parallel_tool_calls = False
        found = self.output_config.format if self.output_config is not None else None
        if (found := found or self.output_format) is not None:
            chat.response_format = JsonSchemaFormat(json_schema=JsonSchema(schema=found.schema))
        return chat

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are sent as text."""
        return getattr(self.thinking, "display", None) != "omitted"

    def _thinking_turns(self) -> int | None:
        edits = self.context_management.edits if self.context_management is not None else None
        given = [edit.turns for edit in edits or () if edit.turns is not None]
        return min(given, default=None)

    def _tools(self) -> tuple[list[ChatTool], dict[str, str]]:
        """The tools that a model can be shown; and how to name those left out → their names."""
        shown, skipped = [], {}
        for index, tool in enumerate(self.tools or ()):
            where = f"tools[{index}]"
            if tool.is_skipped:
                name = tool.name or ""
                skipped[f"{where} {name}" if _NAME.fullmatch(name) else where] = name
                continue
            for name in ("name", "input_schema"):
                if getattr(tool, name) is None:
                    raise InvalidBody(f"{where}.{name} is required", f"{where}.{name}")
            shown.append(ChatTool(function=_function(tool)))
        return shown, skipped

    def _tool_choice(self, tools: list[ChatTool], skipped: dict[str, str]) -> ToolChoice | None:
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            if choice.name in skipped.values():
                raise InvalidBody(
                    f"tool_choice.name is {choice.name!r}, a tool that no model here can call",
                    "tool_choice.name",
                )
            if all(tool.function.name != choice.name for tool in tools):
                raise InvalidBody(
                    f"tool_choice.name is {choice.name!r}, which is not in tools", "tool_choice.name"
                )
            return NamedToolChoice(function=FunctionName(name=choice.name))
        if isinstance(choice, AnyChoice):
            if not tools:
                raise InvalidBody("tool_choice needs tools with an input_schema", "tool_choice")
            return "required"
        return "none" if isinstance(choice, NoneChoice) else None

    def _template_kwargs(self) -> dict[str, Any]:
        """What the fields about thinking mean to a chat template."""
        made: dict[str, Any] = {}
        if self.thinking is not None:
            thinks = not isinstance(self.thinking, ThinkingDisabled)
            made |= {"enable_thinking": thinks, "thinking": thinks}
        effort = self.output_config.effort if self.output_config is not None else None
        if effort is not None:
            made["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
        return made | (self.chat_template_kwargs or {})


_EXTENSIONS = (
    "min_p",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "regex",
    "grammar",
    "cache_salt",
    "priority_class",
    "queue_timeout",
    "deadline",
    "resume_token_ids",
    "return_token_ids",
)


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: PositiveInt
    stream: bool | None = None
    stop_sequences: StopList | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 turns it off."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Without effect: there is one."""

    # Extensions: as in chats.
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    regex: str | None = None
    """The whole output must match it. At most one of this, `grammar` and an output format."""
    grammar: str | None = None
    """Grammar, in llguidance's Lark dialect, that the whole output must match."""
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    """Prefix cache entries are shared only among requests with equal salt."""
    priority_class: PriorityClass | None = None
    queue_timeout: Annotated[float, Meta(ge=0)] | None = None
    """Seconds the request may wait for admission; then 529. 0: served only if there is capacity at once."""
    deadline: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from now by which the answer must be complete; then 504."""
    resume_token_ids: list[TokenId] | None = None
    """Output that another pod already sent for this request: generation goes on behind it."""
    return_token_ids: bool | None = None
    """Write notes about tokens into the stream (`leadline.protocol.stream_notes`)."""
    answer_id: Annotated[str, Meta(max_length=128)] | None = None
    answer_created: int | None = None
    """Of the answer, for a stream that may move to another pod; ids in the answer are made from the id."""

    def chat(self) -> ChatCompletionRequest:
        chat = CountTokensRequest.chat(self)
        chat.stream = self.stream
        chat.max_completion_tokens = self.max_tokens
        chat.stop = self.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        chat.user = self.metadata.user_id if self.metadata is not None else None
        for name in _EXTENSIONS:
            setattr(chat, name, getattr(self, name))
        try:
            constraint_of(chat)
        except ValueError as error:  # written as msgspec's errors, with the chat's name of the format
            problem, _, path = (
                str(error).replace("response_format", "output_config.format").partition(" - at `$.")
            )
            param = path.removesuffix("`")
            raise InvalidBody(f"{problem} - at `{param}`", param) from None
        return chat


def _function(tool: MessagesTool) -> Function:
    assert tool.name is not None
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(msgspec.json.encode(example).decode() for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of the input:\n{examples}".lstrip()
    return Function(name=tool.name, description=description, parameters=tool.input_schema, strict=tool.strict)
