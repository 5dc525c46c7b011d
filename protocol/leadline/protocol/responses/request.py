"""Requests of `POST /v1/responses`, and the chats that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.errors import RequestError
from leadline.protocol.openai.body import InvalidBody
from leadline.protocol.openai.chat import (
    AllowedTool,
    AllowedTools,
    AllowedToolsChoice,
    ChatCompletionRequest,
    CustomTool,
    Function,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
    UserMessage,
)
from leadline.protocol.openai.common import BadWords, LogitBias, PriorityClass, StopList, TokenId, TokenIds
from leadline.protocol.openai.constraints import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from leadline.protocol.openai.other_servers import NOT_OF_OURS, OtherServersFields
from leadline.protocol.responses.items import InputItem, messages_of

__all__ = ["ReasoningConfig", "ResponsesRequest", "TextConfig", "in_words_of_responses"]

LOGPROBS = "message.output_text.logprobs"
"""Of `include`: log probabilities of the output's tokens."""


class TextFormatConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the text of the answer looks."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormatConfig | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Models here write no summaries: their reasoning is given as it is."""


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function, or a tool of another type, which is skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None


class ToolChoiceConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`{"type": "function", "name": …}` or `{"type": "allowed_tools", "mode": …, "tools": […]}`."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
AnswerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")]

_COPIED = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "top_k", "min_p", "deadline"),
    *("queue_timeout", "priority_class", "cache_salt", "stop", "stop_token_ids", "logit_bias", "regex"),
    *("allowed_token_ids", "bad_words"),
    *("grammar", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "chat_template_kwargs"),
    *("resume_token_ids", "return_token_ids", "thinking_budget", "include_reasoning", "structured_outputs"),
    *("priority", "session_id"),
)
"""Fields that a chat has too, with the same meaning."""
_REFUSED = {
    "background": "leave it out: answers are not made in the background",
    "conversation": "use input, which holds the items of the conversation",
    "previous_response_id": "send the whole conversation as input: only a gateway whose setting "
    "responses.store_seconds is set stores responses",
    "prompt": "use instructions and input: there are no stored prompts",
}
_OF_CHATS = {
    "n": "send the request again with another seed",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": f"use include: [{LOGPROBS}]",
    "functions": "use tools",
    "guided_json": "use text.format or structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "truncate_prompt_tokens": "send fewer items",
    "previous_input_messages": "use input",
}
"""Fields of chats and of vLLM, and their names here."""
_WITHOUT_EFFECT = (
    "max_tool_calls",
    "prompt_cache_options",
    "prompt_cache_retention",
    "enable_response_messages",
)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PARAMS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


class ResponsesRequest(OtherServersFields, kw_only=True):
    """Field names and meanings follow OpenAI's API reference."""

    model: str | None = None
    """Served name; null or absent: the only model there is."""
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    """Stands before `input` as a system message."""
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Alternatives per token, with `message.output_text.logprobs` in `include`."""
    text: TextConfig | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ToolChoiceConfig | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    """Requests with the same key go to the same pod with the routing policy `session`."""
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    # Extensions, as in chats.
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | StopList | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    include_reasoning: bool | None = None
    priority: int | None = None
    session_id: str | None = None
    enable_response_messages: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    priority_class: PriorityClass | None = None
    queue_timeout: Annotated[float, Meta(ge=0)] | None = None
    deadline: Annotated[float, Meta(gt=0)] | None = None
    resume_token_ids: list[TokenId] | None = None
    resume_events: Annotated[int, Meta(ge=0)] | None = None
    """Events of this answer that the client has from another pod: numbers go on behind them."""
    return_token_ids: bool | None = None
    """Write notes for a gateway into the stream (leadline.protocol.stream_notes)."""
    resolved_response_id: str | None = None
    """The previous_response_id that a gateway has replaced by the items of that response."""
    answer_id: AnswerId | None = None
    """Id of the answer, where a gateway gives it."""
    answer_created: Annotated[int, Meta(ge=0)] | None = None

    n: Literal[1] | None = None
    messages: None = None
    max_tokens: None = None
    max_completion_tokens: None = None
    response_format: None = None
    reasoning_effort: None = None
    logprobs: Literal[False] | None = None
    functions: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    truncate_prompt_tokens: None = None
    previous_input_messages: None = None

    not_supported: ClassVar[Mapping[str, str]] = {**NOT_OF_OURS, **_OF_CHATS}

    @property
    def session(self) -> str | None:
        """What keeps requests on one pod with the routing policy `session`."""
        return self.session_id or self.prompt_cache_key or self.user or self.safety_identifier

    @property
    def wants_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include

    @property
    def is_pinned(self) -> bool:
        """Whether a stream of the answer stays on its pod: its end repeats log probabilities, which another
        pod does not know."""
        return self.wants_logprobs

    @property
    def function_tools(self) -> list[ResponsesTool]:
        """The tools that can be called."""
        return [tool for tool in self.tools or () if tool.type == "function"]

    @property
    def not_honoured(self) -> list[str]:
        """Fields, other than tools, that ask for what is not done here and does not change what an answer
        says."""
        found = self.skipped_fields
        found += [name for name in _WITHOUT_EFFECT if getattr(self, name) not in (None, False)]
        if self.text is not None and self.text.verbosity is not None:
            found.append("text.verbosity")
        if self.truncation == "auto":
            found.append("truncation")
        return found

    def chat(self) -> ChatCompletionRequest:
        """Return the chat that this request stands for. Raises InvalidBody, which names the field."""
        for field, instead in _REFUSED.items():
            if getattr(self, field) not in (None, False):
                raise InvalidBody(f"{field} is not supported; {instead}", field)
        choice = self._choice()
        copied = {field: value for field in _COPIED if (value := getattr(self, field)) is not None}
        if self.wants_logprobs:
            copied["logprobs"], copied["top_logprobs"] = True, self.top_logprobs or 0
        effort = self.reasoning.effort if self.reasoning is not None else None
        copied |= {
            "messages": self._messages(),
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "max_completion_tokens": self.max_output_tokens,
            "tools": self._tools(),
            "tool_choice": choice,
            "response_format": self._format(),
            "user": self.user or self.safety_identifier,
        }
        try:
            return ChatCompletionRequest(**copied)
        except ValueError as error:  # of a field, written as msgspec's errors
            problem, _, path = str(error).partition(" - at `$.")
            param = path.removesuffix("`")
            param = _PARAMS.get(param, param)
            problem = problem.replace("response_format", "text.format")
            raise InvalidBody(f"{problem} - at `{param}`", param) from None

    def _messages(self) -> list[Any]:
        if self.input is None:
            raise InvalidBody("input is required", "input")
        if isinstance(self.input, str):
            return [*messages_of((), self.instructions), UserMessage(content=self.input)]
        messages = messages_of(self.input, self.instructions)
        if not messages:
            raise InvalidBody("input must hold at least one message", "input")
        return messages

    def _tools(self) -> list[Tool | CustomTool] | None:
        """Functions, and one custom tool for each that is skipped, which the chat names."""
        tools: list[Tool | CustomTool] = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                name = tool.type if tool.name is None else f"{tool.type}.{tool.name}"
                tools.append(CustomTool(custom={"name": name} if _TOOL_NAME.fullmatch(name) else None))
                continue
            if not tool.name:
                raise InvalidBody(f"tools[{index}].name is required", f"tools[{index}].name")
            function = Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            tools.append(Tool(function=function))
        return tools or None

    def _choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        names = {tool.name for tool in self.function_tools}
        if choice is None or choice in ("auto", "none"):
            return choice  # type: ignore[return-value]
        if choice == "required":
            if not names:
                raise InvalidBody("tool_choice is required, but tools holds no function", "tool_choice")
            return "required"
        if isinstance(choice, str):
            raise InvalidBody(
                f"tool_choice must be none, auto, required or an object, got {choice[:64]!r}", "tool_choice"
            )
        if choice.type == "function":
            if not choice.name or choice.name not in names:
                raise InvalidBody(
                    f"tool_choice names {choice.name!r}, which is no function in tools", "tool_choice.name"
                )
            return NamedToolChoice(function=FunctionName(name=choice.name))
        if choice.type == "allowed_tools":
            allowed = [tool.name for tool in choice.tools or () if tool.type == "function" and tool.name]
            missing = [name for name in allowed if name not in names]
            if missing or not allowed:
                named = repr(missing[0]) if missing else "no function"
                raise InvalidBody(
                    f"tool_choice.tools names {named}, but must name functions in tools", "tool_choice.tools"
                )
            entries = [AllowedTool(function=FunctionName(name=name)) for name in allowed]
            return AllowedToolsChoice(allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=entries))
        raise InvalidBody(
            f"tool_choice demands a tool of type {choice.type[:64]!r}; this server can call functions only",
            "tool_choice.type",
        )

    def _format(self) -> ResponseFormat | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return JsonObjectFormat()
        if wanted.schema is None:
            raise InvalidBody("text.format.schema is required", "text.format.schema")
        schema = JsonSchema(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
        return JsonSchemaFormat(json_schema=schema)


def in_words_of_responses(error: RequestError) -> RequestError:
    """Return a refusal of the chat with the name of the field that the client gave. What was found when the
    body was read has it already."""
    if error.code == "invalid_body":
        return error
    old = re.split(r"[.\[]", error.param or "")[0]
    new = _PARAMS.get(old)
    if new is not None:
        if error.message.startswith((f"{old} ", f"{error.param} ")):
            error.message = f"{new} {error.message.split(' ', 1)[1]}"
            error.args = (error.message,)
        error.param = new
    return error
