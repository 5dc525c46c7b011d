"""Tool calls out of a model's text, streamed or whole.

A parser is fed text as it becomes final and gives back content to pass on and calls. Content before a call
streams; markup is held back; a call is given out at once, name and arguments together, when its JSON is
complete. That is a choice: arguments a client cannot parse yet are of no use to it, and a call that turns out
malformed can still become content. Whitespace before a call, and after the last one, belongs to the markup
and is dropped. Malformed markup is content, as it was written.

    Hermes, Qwen     text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    Llama 3 JSON     <|python_tag|>{"name": "f", "parameters": {...}}; {...}

The result does not depend on how the text was cut into pieces, so parsing whole texts is feeding one piece.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from leadline.protocol.text.tokenizer import Tokenizer

__all__ = [
    "ForcedCallParser",
    "ParsedText",
    "ToolCall",
    "ToolFormat",
    "ToolParser",
    "calls_from_json",
    "detect_tool_format",
    "hides_calls",
    "make_tool_parser",
    "parse_tool_calls",
]

ToolFormat = Literal["hermes", "llama3_json"]


def _new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` is JSON text of an object, as the OpenAI API wants it."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=_new_call_id, compare=False)


@dataclass(slots=True)
class ParsedText:
    """What became final with one piece of text: content comes before the calls."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(Protocol):
    """One output's parser."""

    def push(self, text: str) -> ParsedText:
        """Take in more text."""

    def finish(self) -> ParsedText:
        """The output has ended: give out what was held back."""


def detect_tool_format(chat_template: str | None, model_type: str | None = None) -> ToolFormat:
    """Which markup a model writes, judged by what its template shows it; then by its family; else Hermes.

    Hermes is the safe guess: its markup cannot be mistaken for an ordinary answer.
    """
    template = chat_template or ""
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return "llama3_json" if model_type in ("llama4", "mllama") else "hermes"


def make_tool_parser(tool_format: ToolFormat, tool_names: Collection[str] = ()) -> ToolParser:
    """A fresh parser. `tool_names`: Llama's bare JSON only counts as a call when it names one of these (if
    any)."""
    from leadline.engine.frontend.tool_hermes import HermesParser
    from leadline.engine.frontend.tool_llama import LlamaJsonParser

    return HermesParser() if tool_format == "hermes" else LlamaJsonParser(tool_names)


def parse_tool_calls(parser: ToolParser, text: str) -> ParsedText:
    """A whole output at once, with a fresh parser."""
    head, tail = parser.push(text), parser.finish()
    return ParsedText(head.content + tail.content, head.calls + tail.calls)


def hides_calls(tool_format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether the tags around calls are special tokens of this model, which are not in its text unless
    `skip_special_tokens` is off. Llama's tag may be missing."""
    tags = ("<tool_call>", "</tool_call>") if tool_format == "hermes" else ()
    return any(tokenizer.token_id(tag) in tokenizer.special_ids for tag in tags)


class ForcedCallParser:
    """For tool_choice "required" or a named tool, where the output is constrained to bare JSON.

    `named`: the output is that tool's arguments; else it is a list of calls. Output cut short (max_tokens) is
    content.
    """

    def __init__(self, named: str | None = None) -> None:
        self._named = named
        self._text = ""

    def push(self, text: str) -> ParsedText:
        self._text += text
        return ParsedText()

    def finish(self) -> ParsedText:
        text, self._text = self._text, ""
        if self._named is None:
            calls = calls_from_json(text, first_index=0)
            return ParsedText(calls=calls) if calls else ParsedText(content=text)
        arguments = _dump(_load(text))
        if arguments is None:
            return ParsedText(content=text)
        return ParsedText(calls=[ToolCall(0, self._named, arguments)])


def calls_from_json(text: str, *, first_index: int, names: Collection[str] = ()) -> list[ToolCall]:
    """The calls that `text` holds as one JSON object or a list of them; [] if any part of it is no call.

    A call is an object with a `name` and an object `arguments` or `parameters` (absent only if no `names` are
    given).
    """
    value = _load(text)
    calls: list[ToolCall] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
            return []
        if names and (entry["name"] not in names or not entry.keys() & {"arguments", "parameters"}):
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _load(arguments or "{}")
        written = _dump(arguments)
        if written is None or not _is_utf8(entry["name"]):
            return []
        calls.append(ToolCall(first_index + len(calls), entry["name"], written))
    return calls


def _dump(arguments: Any) -> str | None:
    """JSON text of an object, with a UTF-8 form: half of a surrogate pair, which models may write, stays
    escaped. None for anything else, NaN and infinity within included: JSON has neither."""
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return text if _is_utf8(text) else json.dumps(arguments)


def _is_utf8(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False


def _load(text: str) -> Any:
    """Lenient about raw newlines in strings, which models write; None for anything that is not JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
