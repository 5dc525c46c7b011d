"""Llama 3: bare JSON objects at the start of the output, or behind `<|python_tag|>`.

    <|python_tag|>{"name": "f", "parameters": {...}}; {...}

The tag is a special token and usually not in the text at all, hence calls at the start. Calls are separated
by white space, `;` or `,`. What is no call of a known tool (an ordinary JSON answer) is content, and so is
all that follows it, further tags included.
"""

from __future__ import annotations

from collections.abc import Collection

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import read_calls
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["TAG", "LlamaParser", "rules", "start"]

TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    call = grammar.json_call("parameters")
    further = grammar.more(call, f'{GAP} ";" {GAP}')
    bare = grammar.rule(f"{call} {further}", name="bare")
    return f"({grammar.tag(TAG)} {GAP})? {bare}"


def start(grammar: CallGrammar) -> str:
    """See `ToolFormat.start`: what begins with a brace is a call."""
    text = r"/[ \n]{0,4}[^{\[ \n](.|\n)*/"
    return f"({text} | {text} {grammar.tag(TAG)} {GAP} bare | {GAP} call)?"


class LlamaParser(CallParser):
    """With `names`, only objects that name one of them are calls."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._at_start = True
        self._plain = False
        """All that follows is content."""

    def parse(self) -> Steps[None]:
        if self._plain:
            yield from self.content_until()
        if not (self._at_start and (yield from self._starts_with_call())):
            yield from self.content_until(TAG)
        try:
            yield from self._calls()
        except Broken:
            self._plain = True
            raise

    def _starts_with_call(self) -> Steps[bool]:
        self._at_start = False
        self.mark()
        yield from self.skip()
        if (yield from self.comes(TAG)) or (yield from self.peek()) in ("{", "["):
            return True
        self.unread()
        return False

    def _calls(self) -> Steps[None]:
        yield from self.skip(_SEPARATORS)
        while True:
            yield from read_calls(self, self._names)
            self.mark()
            yield from self.skip(_SEPARATORS)
            if not (yield from self.peek()):
                return
