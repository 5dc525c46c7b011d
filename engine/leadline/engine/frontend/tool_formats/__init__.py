"""Tool calls in a model's output, in the form that the model writes them.

parser      the base of all formats: text in pieces in, content and parts of calls out
json_calls  calls written in JSON
forced      calls that a grammar forces
hermes, llama   the formats

A format is a file with a `CallParser` and a row in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.engine.frontend.tool_formats import hermes, llama
from leadline.engine.frontend.tool_formats.forced import NamedCallParser, RequiredCallParser
from leadline.engine.frontend.tool_formats.parser import (
    CallDelta,
    CallParser,
    ParsedText,
    ToolCall,
    parse_whole,
)
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = [
    "FORMATS",
    "CallDelta",
    "CallParser",
    "NamedCallParser",
    "ParsedText",
    "RequiredCallParser",
    "ToolCall",
    "ToolFormat",
    "detect_format",
    "parse_whole",
]

Tools = Sequence[Mapping[str, Any]]
"""As a request lists them: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way in which models write calls."""

    name: str
    parser: Callable[[Tools], CallParser]
    """A parser for one output of a request with these tools."""
    rules: Callable[[Callable[[str], str], bool], str]
    """Lark rules of `calls` over `json_of_call`, the call itself. Takes a function that writes a tag, and
    whether there may be several calls."""
    arguments: str
    """The key of the arguments in a call."""
    shown_in: Callable[[str], bool]
    """Whether a chat template shows the model this format."""
    families: frozenset[str] = frozenset()
    """Model families that write it though their template does not show it."""
    tags: tuple[str, ...] = ()
    """Markup that may be special tokens of a model; its output must show them then."""

    def is_hidden(self, tokenizer: Tokenizer) -> bool:
        """Whether the markup is in the text only with `skip_special_tokens` off."""
        return any(tokenizer.token_id(tag) in tokenizer.special_ids for tag in self.tags)


HERMES = ToolFormat(
    "hermes",
    parser=lambda tools: hermes.HermesParser(),
    rules=hermes.rules,
    arguments="arguments",
    shown_in=lambda template: hermes.OPEN in template,
    tags=(hermes.OPEN, hermes.CLOSE),
)
LLAMA = ToolFormat(
    "llama3_json",
    parser=lambda tools: llama.LlamaParser([tool["function"]["name"] for tool in tools]),
    rules=llama.rules,
    arguments="parameters",
    shown_in=lambda template: llama.TAG in template or ("ipython" in template and '"parameters"' in template),
    families=frozenset(("llama4", "mllama")),
)
FORMATS = (HERMES, LLAMA)
"""The first that a template shows is a model's."""


def detect_format(chat_template: str | None, model_type: str | None = None) -> ToolFormat:
    """The format that a model writes: by its template, then by its family; else Hermes, which cannot be
    mistaken for an ordinary answer."""
    for tool_format in FORMATS:
        if tool_format.shown_in(chat_template or ""):
            return tool_format
    return next((one for one in FORMATS if model_type in one.families), HERMES)
