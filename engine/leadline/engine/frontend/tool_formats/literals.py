"""Values that are nearly JSON, turned into JSON text as they come: Python's literals, and Gemma's.

PYTHON            {'a': [1, True, None], "b": 'it\'s'}
GEMMA             {a:[1,true,null],b:<|"|>it's<|"|>}
FUNCTION_GEMMA    {a:[1,true,null],b:<escape>it's<escape>}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from leadline.engine.frontend.tool_formats.json_calls import NUMBER
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["FUNCTION_GEMMA", "GEMMA", "PYTHON", "Notation", "convert", "read_object", "read_value"]

Give = Callable[[str], None]

_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SIMPLE = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007", "v": "\\u000b"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_ATOM_ENDS = " \t\r\n,:=<>{}[]()\"'"
_NUMERIC = frozenset("-+.eE0123456789")
_MOST_NESTED = 64


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written."""

    quotes: tuple[str, ...]
    """Around a string; a longer one before its own beginning."""
    escapes: bool
    """Strings have escapes as in Python."""
    bare_keys: bool
    """Keys of an object may be without quotes."""


PYTHON = Notation(('"""', "'''", '"', "'"), escapes=True, bare_keys=False)
GEMMA = Notation(('<|"|>',), escapes=False, bare_keys=True)
FUNCTION_GEMMA = Notation(("<escape>",), escapes=False, bare_keys=True)


def read_value(parser: CallParser, give: Give, notation: Notation, depth: int = 0) -> Steps[None]:
    """Read one value within a call, given out as JSON text as it comes. Raises Broken."""
    for quote in notation.quotes:
        if (yield from parser.comes(quote)):
            yield from _string(parser, give, quote, notation)
            return
    char = yield from parser.peek()
    if depth > _MOST_NESTED:
        raise Broken
    if char == "{":
        yield from read_object(parser, give, notation, depth)
    elif char and char in "[(":
        yield from _list(parser, give, notation, depth)
    else:
        yield from _atom(parser, give)


def read_object(parser: CallParser, give: Give, notation: Notation, depth: int = 0) -> Steps[None]:
    """Read `{key: value, ...}` within a call. Raises Broken."""
    yield from parser.expect("{")
    give("{")
    before = ""
    parser.mark(in_call=True)
    yield from parser.skip()
    while not (yield from parser.comes("}")):
        key = yield from _key(parser, notation)
        yield from parser.skip()
        yield from parser.expect(":")
        yield from parser.skip()
        parser.accept()
        give(f"{before}{key}: ")
        before = ", "
        yield from read_value(parser, give, notation, depth + 1)
        yield from _next(parser, "}")
    parser.accept()
    give("}")


def _list(parser: CallParser, give: Give, notation: Notation, depth: int) -> Steps[None]:
    closer = "]" if (yield from parser.comes("[")) else ")"
    if closer == ")":
        yield from parser.expect("(")
    give("[")
    before = ""
    parser.mark(in_call=True)
    yield from parser.skip()
    while not (yield from parser.comes(closer)):
        parser.accept()
        give(before)
        before = ", "
        yield from read_value(parser, give, notation, depth + 1)
        yield from _next(parser, closer)
    parser.accept()
    give("]")


def _next(parser: CallParser, closer: str) -> Steps[None]:
    """Read the comma behind an item; the last item may have one too. Raises Broken."""
    parser.mark(in_call=True)
    yield from parser.skip()
    if (yield from parser.comes(",")):
        yield from parser.skip()
    elif (yield from parser.peek()) != closer:
        raise Broken


def _key(parser: CallParser, notation: Notation) -> Steps[str]:
    """JSON text of a key."""
    for quote in notation.quotes:
        if (yield from parser.comes(quote)):
            pieces: list[str] = []
            yield from _string(parser, pieces.append, quote, notation)
            return "".join(pieces)
    if not notation.bare_keys:
        raise Broken
    return json.dumps((yield from parser.name(":,{}[]<>\n")).strip(), ensure_ascii=False)


def _string(parser: CallParser, give: Give, quote: str, notation: Notation) -> Steps[None]:
    """The rest of a string."""

    def give_text(piece: str) -> None:
        give(json.dumps(piece, ensure_ascii=False)[1:-1])

    give('"')
    ends = (quote, "\\") if notation.escapes else (quote,)
    while (yield from parser.pass_until(give_text, *ends)) != quote:
        give((yield from _escape(parser)))
    give('"')


def _escape(parser: CallParser) -> Steps[str]:
    """What stands behind a backslash, in JSON. An escape that is none keeps its backslash, as in Python."""
    char = yield from parser.peek()
    if char in _SIMPLE:
        parser.take(1)
        return _SIMPLE[char]
    if char and char in "\\'\"":
        parser.take(1)
        return json.dumps(char)[1:-1]
    if char == "\n":
        parser.take(1)
        return ""
    if char in _DIGITS:
        digits = (yield from parser.ahead(1 + _DIGITS[char]))[1:]
        if len(digits) == _DIGITS[char] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            code = int(digits, 16)
            if code <= 0x10FFFF:
                parser.take(1 + len(digits))
                return json.dumps(chr(code))[1:-1]
        elif len(digits) < _DIGITS[char] and parser.ended:
            parser.take(1 + len(digits))
            return ""
    return "\\\\" if char else ""


def _atom(parser: CallParser, give: Give) -> Steps[None]:
    """A number or a word. What a cut leaves of it is given out too."""
    atom = yield from parser.run_of(_ATOM_ENDS, 1024)
    cut = parser.ended and len(atom) == len(parser.unread_text())
    if atom in _WORDS:
        give(_WORDS[atom])
    elif NUMBER.fullmatch(atom) or (atom and cut and set(atom) <= _NUMERIC):
        give(atom)
    elif atom and cut and (words := [word for word in _WORDS if word.startswith(atom)]):
        give(_WORDS[words[0]][: len(atom)])
    else:
        raise Broken
    parser.take(len(atom))


def convert(text: str, notation: Notation) -> str | None:
    """JSON text of a whole value, or None if it is none."""
    parser = _ValueParser(notation)
    parser.push(text)
    parser.finish()
    return parser.value


class _ValueParser(CallParser):
    """Reads a text that is exactly one value."""

    def __init__(self, notation: Notation) -> None:
        super().__init__()
        self.value: str | None = None
        self._notation = notation
        self._done = False

    def parse(self) -> Steps[None]:
        if not self._done:
            self._done = True
            pieces: list[str] = []
            yield from read_value(self, pieces.append, self._notation)
            if not (yield from self.peek()):
                self.value = "".join(pieces)
        yield from self.content_until()
