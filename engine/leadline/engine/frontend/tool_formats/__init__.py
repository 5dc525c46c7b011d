"""Tool calls in a model's output, in the form that the model writes them.

parser      the base of all formats: text in pieces in, content and parts of calls out
json_calls  calls written in JSON
literals    values written as in Python or Gemma's notation
typed_text  parameters written as plain text, made JSON by a tool's schema
grammar     the parts of grammars that hold calls to a form
forced      calls that a grammar forces
hermes, llama, ...   the formats

A format is a file with a `CallParser` and `rules`, and a row in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.engine.errors import ConfigError
from leadline.engine.frontend.tool_formats import (
    deepseek,
    gemma,
    glm45,
    granite,
    harmony,
    hermes,
    kimi_k2,
    lfm2,
    llama,
    minimax_m2,
    mistral,
    phi4_mini,
    pythonic,
    qwen3_coder,
)
from leadline.engine.frontend.tool_formats.forced import NamedCallParser, RequiredCallParser
from leadline.engine.frontend.tool_formats.grammar import CallGrammar, ToolSchema
from leadline.engine.frontend.tool_formats.literals import FUNCTION_GEMMA, GEMMA
from leadline.engine.frontend.tool_formats.parser import (
    CallDelta,
    CallParser,
    ParsedText,
    ToolCall,
    parse_whole,
)
from leadline.engine.frontend.tool_formats.typed_text import ToolTypes
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = [
    "FORMATS",
    "HERMES",
    "CallDelta",
    "CallGrammar",
    "CallParser",
    "NamedCallParser",
    "ParsedText",
    "RequiredCallParser",
    "ToolCall",
    "ToolFormat",
    "ToolSchema",
    "detect_format",
    "format_named",
    "parse_whole",
]

Tools = Sequence[Mapping[str, Any]]
"""As a request lists them: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way in which models write calls."""

    name: str
    models: str
    """For the docs: models that write it."""
    parser: Callable[[Tools], CallParser]
    """A parser for one output of a request with these tools."""
    rules: Callable[[CallGrammar], str]
    """The body of the rule `call`: one stretch of calls, from the tag that opens it."""
    shown_in: Callable[[str], bool]
    """Whether a chat template shows the model this format."""
    families: frozenset[str] = frozenset()
    """Model families that write it though their template does not show it."""
    tags: tuple[str, ...] = ()
    """Markup that may be special tokens of a model; its output must show them then."""
    start: Callable[[CallGrammar], str] | None = None
    """The body of the rule `start` of a text with calls, where calls cannot come anywhere in it."""

    def is_hidden(self, tokenizer: Tokenizer) -> bool:
        """Whether the markup is in the text only with `skip_special_tokens` off."""
        return any(tokenizer.token_id(tag) in tokenizer.special_ids for tag in self.tags)


def _names(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


HERMES = ToolFormat(
    "hermes",
    "Hermes 2 and 3, Qwen2.5, Qwen3, SmolLM3, Granite 4",
    parser=lambda tools: hermes.HermesParser(),
    rules=hermes.rules,
    shown_in=lambda template: hermes.OPEN in template,
    tags=(hermes.OPEN, hermes.CLOSE),
)
LLAMA = ToolFormat(
    "llama3_json",
    "Llama 3.1 to 3.3, Llama 4",
    parser=lambda tools: llama.LlamaParser(_names(tools)),
    rules=llama.rules,
    start=llama.start,
    shown_in=lambda template: llama.TAG in template or ("ipython" in template and '"parameters"' in template),
    families=frozenset(("llama4", "mllama")),
    tags=(llama.TAG,),
)
PYTHONIC = ToolFormat(
    "pythonic",
    "Llama 3.2, Llama 4 and Gemma 3 with a template that asks for it",
    parser=lambda tools: pythonic.PythonicParser(_names(tools)),
    rules=pythonic.rules,
    start=pythonic.start,
    shown_in=lambda template: "func_name1(" in template,
    tags=(pythonic.START, pythonic.END),
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    "Qwen3-Coder, Qwen3.5",
    parser=lambda tools: qwen3_coder.Qwen3CoderParser(ToolTypes(tools)),
    rules=qwen3_coder.rules,
    shown_in=lambda template: qwen3_coder.FUNCTION in template,
    tags=(qwen3_coder.OPEN, qwen3_coder.CLOSE),
)
GLM45 = ToolFormat(
    "glm45",
    "GLM 4.5 to 4.7",
    parser=lambda tools: glm45.Glm45Parser(ToolTypes(tools)),
    rules=glm45.rules,
    shown_in=lambda template: glm45.KEY in template,
    tags=(glm45.OPEN, glm45.CLOSE, glm45.KEY),
)
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    "MiniMax M2",
    parser=lambda tools: minimax_m2.MiniMaxM2Parser(ToolTypes(tools)),
    rules=minimax_m2.rules,
    shown_in=lambda template: minimax_m2.OPEN in template,
    tags=(minimax_m2.OPEN, minimax_m2.CLOSE),
)
MISTRAL = ToolFormat(
    "mistral",
    "Mistral 7B v0.3, Nemo, Small, Large, Ministral, Devstral, Magistral",
    parser=lambda tools: mistral.MistralParser(),
    rules=mistral.rules,
    shown_in=lambda template: mistral.OPEN in template,
    tags=(mistral.OPEN, mistral.ARGUMENTS),
)
DEEPSEEK = ToolFormat(
    "deepseek_v3",
    "DeepSeek V3, R1, V3.1",
    parser=lambda tools: deepseek.DeepSeekParser(),
    rules=deepseek.rules,
    shown_in=lambda template: deepseek.OPEN in template,
    tags=(deepseek.ALL, deepseek.OPEN, deepseek.SEPARATOR, deepseek.CLOSE, deepseek.END),
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    "Kimi K2",
    parser=lambda tools: kimi_k2.KimiK2Parser(),
    rules=kimi_k2.rules,
    shown_in=lambda template: kimi_k2.OPEN in template or "<|im_system|>tool_declare" in template,
    tags=(kimi_k2.ALL, kimi_k2.OPEN, kimi_k2.ARGUMENTS, kimi_k2.CLOSE, kimi_k2.END),
)
PHI4_MINI = ToolFormat(
    "phi4_mini",
    "Phi-4-mini",
    parser=lambda tools: phi4_mini.Phi4MiniParser(),
    rules=phi4_mini.rules,
    shown_in=lambda template: any(tag in template for tag in (phi4_mini.CLOSE, "<|/tool|>", phi4_mini.PLAIN)),
    tags=(phi4_mini.OPEN, phi4_mini.CLOSE),
)
GRANITE = ToolFormat(
    "granite3",
    "Granite 3",
    parser=lambda tools: granite.GraniteParser(),
    rules=granite.rules,
    shown_in=lambda template: granite.OPEN in template,
    tags=(granite.OPEN,),
)
HARMONY = ToolFormat(
    "harmony",
    "gpt-oss",
    parser=lambda tools: harmony.HarmonyParser(),
    rules=harmony.rules,
    start=harmony.start,
    shown_in=lambda template: harmony.CHANNEL in template and harmony.TO in template,
    tags=(harmony.CHANNEL, harmony.MESSAGE),
)
GEMMA4 = ToolFormat(
    "gemma4",
    "Gemma 4",
    parser=lambda tools: gemma.GemmaParser(gemma.OPEN, gemma.CLOSE, GEMMA),
    rules=lambda grammar: gemma.rules(grammar, gemma.OPEN, gemma.CLOSE, GEMMA),
    shown_in=lambda template: gemma.OPEN in template,
    tags=(gemma.OPEN, gemma.CLOSE, *GEMMA.quotes),
)
FUNCTIONGEMMA = ToolFormat(
    "functiongemma",
    "FunctionGemma (Gemma 3 270M)",
    parser=lambda tools: gemma.GemmaParser(gemma.FUNCTION_OPEN, gemma.FUNCTION_CLOSE, FUNCTION_GEMMA),
    rules=lambda grammar: gemma.rules(grammar, gemma.FUNCTION_OPEN, gemma.FUNCTION_CLOSE, FUNCTION_GEMMA),
    shown_in=lambda template: gemma.FUNCTION_OPEN in template,
    tags=(gemma.FUNCTION_OPEN, gemma.FUNCTION_CLOSE, *FUNCTION_GEMMA.quotes),
)
LFM2 = ToolFormat(
    "lfm2",
    "LFM2, LFM2.5",
    parser=lambda tools: lfm2.Lfm2Parser(),
    rules=lfm2.rules,
    shown_in=lambda template: lfm2.OPEN in template or "<|tool_list_start|>" in template,
    tags=(lfm2.OPEN, lfm2.CLOSE),
)
FORMATS = (
    QWEN3_CODER,
    GLM45,
    MINIMAX_M2,
    MISTRAL,
    DEEPSEEK,
    KIMI_K2,
    PHI4_MINI,
    GRANITE,
    HARMONY,
    GEMMA4,
    FUNCTIONGEMMA,
    LFM2,
    PYTHONIC,
    HERMES,
    LLAMA,
)
"""The first that a template shows is a model's."""


def format_named(name: str) -> ToolFormat:
    """The format of this name. Raises ConfigError."""
    named = {tool_format.name: tool_format for tool_format in FORMATS}
    if name not in named:
        raise ConfigError(f"tool_format must be one of {', '.join(sorted(named))}, not {name!r}")
    return named[name]


def detect_format(
    chat_template: str | None, model_type: str | None = None, *, shows_tools: bool = False
) -> ToolFormat | None:
    """The format that a model writes: by its template, then by its family. None where the template shows
    the model its tools (`shows_tools`) and asks for a form that is not known. A template that leaves tools
    out says nothing; then it is Hermes, which cannot be mistaken for an ordinary answer."""
    for tool_format in FORMATS:
        if tool_format.shown_in(chat_template or ""):
            return tool_format
    of_family = next((one for one in FORMATS if model_type in one.families), None)
    return of_family or (None if shows_tools else HERMES)
