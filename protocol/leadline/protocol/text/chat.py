"""Chat messages to prompt text, by the model's own Jinja template.

Owns the sandboxed Jinja environment and what messages look like when a template sees them. Templates come
from model repositories and are untrusted: they run in jinja2's immutable sandbox and see plain JSON values
only. A template that raises is telling the caller something about the messages, so every failure while
rendering is a RequestError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leadline.protocol.errors import RequestError, UnsupportedModel
from leadline.protocol.text.messages_in import normalize_messages

__all__ = ["ChatRenderer"]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

# Marks the end of the message to continue. The space after it tells a template that trims content from one
# that does not: trimming removes the space, and then the caller's own trailing space would have gone too.
_MARK = "\ue0f1\ue0f2\ue0f3"


class ChatRenderer:
    """Renders conversations for one model. Safe for threads.

    `templates` maps names to Jinja sources ("default", perhaps "tool_use"); `special_tokens` are visible to
    them by name (`bos_token`, ...). Raises UnsupportedModel for a template that is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        for name, source in self.sources.items():
            try:
                template = self._compiled[name] = environment.from_string(source)
                self._globals[name] = dict(template.globals)
            except jinja2.TemplateError as error:
                raise UnsupportedModel(
                    f"the model's chat template {name!r} is not valid Jinja: {error}"
                ) from error

    @property
    def available(self) -> bool:
        """Whether the model has a chat template at all."""
        return bool(self._compiled)

    def source_for(self, *, tools: bool) -> str | None:
        """The template a request with or without tools is rendered by."""
        name = self._pick(tools)
        return None if name is None else self.sources[name]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
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
        extra = dict(template_kwargs or {})
        if clash := sorted(_RESERVED & extra.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {clash[0]!r}, which is a field of the request",
                param="chat_template_kwargs",
            )
        plain = normalize_messages(messages, developer_known="developer" in self.sources[name])
        if continue_final_message:
            plain[-1]["content"] += _MARK + " "
        variables: dict[str, Any] = {
            **self._special_tokens,
            **extra,
            "messages": plain,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": [dict(document) for document in documents] if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _rendered(self._compiled[name], self._globals[name], variables)
        except jinja2.TemplateError as error:
            raise _rejected(str(error.message)) from error
        except Exception as error:  # a template may fail in any way Python code can
            raise _rejected(f"{type(error).__name__}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _pick(self, tools: bool) -> str | None:
        if tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" in self._compiled or not self._compiled:
            return "default" if self._compiled else None
        return next(iter(self._compiled))


def _rendered(template: jinja2.Template, known: dict[str, Any], variables: dict[str, Any]) -> str:
    """`template.render(variables)`, without the copy that it makes of all `known` globals one by one, which
    takes as long as a short chat. `known` is `template.globals` as a plain dict."""
    environment = template.environment
    context = environment.context_class(
        environment, {**known, **variables}, template.name, template.blocks, known
    )
    return environment.concat(template.root_render_func(context))


def _rejected(complaint: str) -> RequestError:
    return RequestError(
        f"the model's chat template rejected the messages: {complaint}",
        param="messages",
        code="chat_template_error",
    )


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK)
    if at < 0:
        raise RequestError(
            "continue_final_message is set, but the model's chat template leaves the final message out",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(" ", at + len(_MARK)) else text[:at].rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without its questions where their answers are known: most of a template's attributes are
    keys of messages and facts about the loop, and each question takes about a microsecond."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


def _environment() -> ImmutableSandboxedEnvironment:
    """The helpers and settings that templates written for transformers rely on."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for rendering it is only its
    body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute jinja2 reads)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
