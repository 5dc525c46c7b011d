"""Chat messages to prompt text, by the model's own Jinja template.

Owns the sandboxed Jinja environment and what messages look like when a template sees them. Templates come
from model repositories and are untrusted: they run in jinja2's immutable sandbox and see plain JSON values
only. A template that raises is telling the caller something about the messages, so every failure while
rendering is a RequestError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from leadline.protocol.errors import RequestError, UnsupportedModel
from leadline.protocol.text.messages_in import normalize_messages
from leadline.protocol.text.reasoning_effort import effort_variables, variables_of
from leadline.protocol.text.template_sandbox import MAX_SOURCE, Budget, TooMuch, make_environment, render
from leadline.protocol.text.template_shape import PLAIN, TemplateShape, find_shape

__all__ = ["ChatRenderer"]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# Marks the end of the message to continue. The space after it tells a template that trims content from one
# that does not: trimming removes the space, and then the caller's own trailing space would have gone too.
_MARK = "\ue0f1\ue0f2\ue0f3"

_GREETING = [{"role": "user", "content": "Hello"}]
_PROBE_TOOL_NAME = "lead_tool"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_TOOL_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBE_SECONDS = 0.5


class ChatRenderer:
    """Renders conversations for one model. Safe for threads.

    `templates` maps names to Jinja sources ("default", perhaps "tool_use"); `special_tokens` are visible to
    them by name (`bos_token`, ...). Raises UnsupportedModel for a template that is not valid Jinja, or makes
    too much or takes too long even for a greeting.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = make_environment()
        self.sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, TemplateShape] = {}
        self._effort_reads: dict[str, frozenset[str]] = {}
        for name, source in self.sources.items():
            if len(source) > MAX_SOURCE:
                raise UnsupportedModel(
                    f"the model's chat template {name!r} has {len(source):,} characters; {MAX_SOURCE:,} are "
                    "the most"
                )
            try:
                template = self._compiled[name] = environment.from_string(source)
                self._globals[name] = dict(template.globals)
            except Exception as error:  # nested too deeply for Python's compiler, and the like
                raise UnsupportedModel(
                    f"the model's chat template {name!r} is not valid Jinja: {error}"
                ) from error
            self._shapes[name] = self._probe(name)
            self._effort_reads[name] = variables_of(environment, source)

    @property
    def available(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._compiled)

    def source_for(self, *, tools: bool) -> str | None:
        """The template a request with or without tools is rendered by."""
        name = self._pick(tools)
        return None if name is None else self.sources[name]

    def shows_tools(self) -> bool:
        """Whether the template writes the tools of a request into the prompt."""
        name = self._pick(True)
        if name is None:
            return False
        try:
            return _PROBE_TOOL_NAME in self._render_probe(name, _GREETING, True, _PROBE_SECONDS)
        except Exception:  # it wants what a greeting lacks
            return re.search(r"\btools\b", self.sources[name]) is not None

    def effort_variables(self, effort: str, *, tools: bool) -> dict[str, Any]:
        """Return the variables that tell the template of a `reasoning_effort`; empty where it reads none."""
        name = self._pick(tools)
        return {} if name is None else effort_variables(effort, self._effort_reads[name], self.sources[name])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> str:
        """The prompt text of a conversation. It holds its special tokens: encode with
        add_special_tokens=False.

        Raises RequestError: no template, malformed or no messages, contradictory options, or the template's
        own complaint, word for word.
        """
        name = self._pick(bool(tools))
        if name is None:
            raise RequestError(
                "this model has no chat template, so it cannot take messages; send a prompt to "
                "/v1/completions, "
                "or serve a model folder that holds chat_template.jinja",
                param="messages",
                code="no_chat_template",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message and add_generation_prompt begins a "
                "new one: set "
                "add_generation_prompt to false",
                param="continue_final_message",
            )
        extra = self.effort_variables(reasoning_effort, tools=bool(tools)) if reasoning_effort else {}
        extra.update(template_kwargs or {})
        if clash := sorted(_RESERVED & extra.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {clash[0]!r}, which is a field of the request",
                param="chat_template_kwargs",
            )
        plain = normalize_messages(
            messages, self._shapes[name], developer_known="developer" in self.sources[name]
        )
        if continue_final_message:
            _mark(plain[-1])
        variables: dict[str, Any] = {
            **self._special_tokens,
            **extra,
            "messages": plain,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": [dict(document) for document in documents] if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = render(self._compiled[name], self._globals[name], variables, Budget(len(plain)))
        except TooMuch as error:
            raise RequestError(
                f"rendering the model's chat template was stopped: {error}",
                param="messages",
                code="chat_template_error",
            ) from error
        except jinja2.TemplateError as error:
            raise _rejected(str(error.message)) from error
        except Exception as error:  # a template may fail in any way Python code can
            raise _rejected(f"{type(error).__name__}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _probe(self, name: str) -> TemplateShape:
        """Which forms of messages the template takes. Raises UnsupportedModel as the class says."""

        def render_probe(messages: Sequence[Mapping[str, Any]], tools: bool) -> str | None:
            try:
                return self._render_probe(name, messages, tools, _PROBE_SECONDS)
            except TooMuch:
                raise
            except Exception:
                return None

        try:
            self._render_probe(name, _GREETING, False, None)
        except TooMuch as error:
            raise UnsupportedModel(
                f"rendering the model's chat template {name!r} was stopped: {error}"
            ) from error
        except Exception:
            pass  # it may want what a greeting lacks; requests will hear of it
        try:
            return find_shape(render_probe, self.sources[name])
        except TooMuch:
            return PLAIN  # one of many probes that would take as long

    def _render_probe(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: bool, seconds: float | None
    ) -> str:
        variables = {
            **self._special_tokens,
            "messages": list(messages),
            "tools": [_PROBE_TOOL] if tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }
        budget = Budget(len(messages), seconds)
        return render(self._compiled[name], self._globals[name], variables, budget)

    def _pick(self, tools: bool) -> str | None:
        if tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" in self._compiled or not self._compiled:
            return "default" if self._compiled else None
        return next(iter(self._compiled))


def _rejected(complaint: str) -> RequestError:
    return RequestError(
        f"the model's chat template rejected the messages: {complaint}",
        param="messages",
        code="chat_template_error",
    )


def _mark(message: dict[str, Any]) -> None:
    """Mark the end of its text."""
    content = message["content"]
    if isinstance(content, list):
        content[-1]["text"] += _MARK + " "
    else:
        message["content"] = (content or "") + _MARK + " "


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK)
    if at < 0:
        raise RequestError(
            "continue_final_message is set, but the model's chat template leaves the final message out",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(" ", at + len(_MARK)) else text[:at].rstrip()
