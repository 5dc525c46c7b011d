"""Calls written in JSON, read while they come: `{"name": "f", "arguments": {...}}`, alone or in a list.

`follow` passes a JSON value on piece by piece, checked as it comes, so that what went out is the beginning of
a value in any case. It is lenient where models are careless and the meaning is plain: a raw control character
in a string is escaped, and so is a backslash that escapes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["NUMBER", "follow", "follow_object", "read_calls"]

_BLANK = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMERIC = re.compile(r"[-+.eE0-9]+")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = frozenset(("true", "false", "null"))
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LONGEST_ATOM = 1024
"""Of a number or a word; a longer one is no JSON that anybody means."""

# What may come next.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING = range(7)


class _Follower:
    """Where one JSON value stands. `feed` takes as much of a text as can be told to belong to it."""

    def __init__(self) -> None:
        self._state = _VALUE
        self._closers: list[str] = []
        self._is_key = False
        self.done = False

    def feed(self, text: str, out: list[str], *, ended: bool) -> int:
        """Append the value's text to `out`; returns how many characters of `text` were read. The rest waits
        for more: part of a number, a word or an escape. Raises Broken, with that number as its argument."""
        at = 0
        while at < len(text) and not self.done:
            if self._state == _STRING:
                length = self._in_string(text, at, out, ended)
            else:
                length = self._between(text, at, out, ended)
            if length < 0:
                raise Broken(at)
            if not length:
                break
            at += length
        return at

    def _in_string(self, text: str, at: int, out: list[str], ended: bool) -> int:
        """Characters read; 0: more is needed."""
        if plain := _PLAIN.match(text, at):
            out.append(plain[0])
            return len(plain[0])
        char = text[at]
        if char == '"':
            out.append(char)
            self._state = _COLON if self._is_key else _NEXT
            self.done = not self._closers
            return 1
        if char != "\\":
            out.append(f"\\u{ord(char):04x}" if char not in "\n\r\t" else json.dumps(char)[1:-1])
            return 1
        if escape := _ESCAPE.match(text, at):
            out.append(escape[0])
            return len(escape[0])
        rest = text[at + 1 : at + 6]
        if (not rest or (rest[0] == "u" and len(rest) < 5 and _hexadecimal(rest[1:]))) and not ended:
            return 0
        if rest:
            out.append("\\\\")
        return 1

    def _between(self, text: str, at: int, out: list[str], ended: bool) -> int:
        """Characters read; 0: more is needed, -1: none of them can stand here."""
        char, state = text[at], self._state
        if char in _BLANK:
            out.append(char)
        elif state in (_VALUE, _FIRST_ITEM) and char not in '{["]}:,':
            return self._atom(text, at, out, ended)
        elif state in (_VALUE, _FIRST_ITEM) and char in '{["':
            self._opens(char, out)
        elif state in (_KEY, _FIRST_KEY) and char == '"':
            self._opens(char, out, is_key=True)
        elif state == _COLON and char == ":":
            out.append(char)
            self._state = _VALUE
        elif state == _NEXT and char == ",":
            out.append(char)
            self._state = _KEY if self._closers[-1] == "}" else _VALUE
        elif state in (_NEXT, _FIRST_ITEM, _FIRST_KEY) and char == self._closers[-1]:
            out.append(char)
            self._closers.pop()
            self._ended_value()
        else:
            return -1
        return 1

    def _opens(self, char: str, out: list[str], *, is_key: bool = False) -> None:
        out.append(char)
        self._is_key = is_key
        if char == '"':
            self._state = _STRING
        else:
            self._closers.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM

    def _atom(self, text: str, at: int, out: list[str], ended: bool) -> int:
        """A number or a word, which must be there in full."""
        pattern = _WORD if text[at].isalpha() else _NUMERIC
        found = pattern.match(text, at)
        if found is None or len(found[0]) > _LONGEST_ATOM:
            return -1
        atom = found[0]
        if pattern is _WORD and not any(word.startswith(atom) for word in _WORDS):
            return -1
        cut = found.end() == len(text)
        if cut and not ended:
            return 0
        if not cut and not (atom in _WORDS if pattern is _WORD else NUMBER.fullmatch(atom)):
            return -1
        out.append(atom)
        self._ended_value()
        return len(atom)

    def _ended_value(self) -> None:
        self._state = _NEXT
        self.done = not self._closers


def _hexadecimal(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text)


def follow(parser: CallParser, give: Callable[[str], None]) -> Steps[None]:
    """Read one JSON value, given out as it comes. What a cut leaves of its last number or word is given out
    too. Raises Broken in front of what no JSON could have there."""
    follower = _Follower()
    while True:
        pieces: list[str] = []
        try:
            text = parser.unread_text()
            read = follower.feed(text, pieces, ended=parser.ended)
        except Broken as error:
            parser.take(error.args[0])
            if pieces:
                give("".join(pieces))
            raise Broken from None
        parser.take(read)
        if pieces:
            give("".join(pieces))
        if follower.done:
            return
        if parser.ended:
            raise Broken
        yield


def _read_string(parser: CallParser) -> Steps[str]:
    pieces: list[str] = []
    if (yield from parser.peek()) != '"':
        raise Broken
    yield from follow(parser, pieces.append)
    text: str = json.loads("".join(pieces))
    return text


def follow_object(parser: CallParser, name: str, call_id: str | None = None) -> Steps[None]:
    """A call of `name` begins; its arguments are the JSON object that comes. Raises Broken, before the call
    begins if something else comes."""
    yield from parser.skip()
    if (yield from parser.peek()) != "{":
        raise Broken
    parser.begin(name, call_id)
    yield from follow(parser, parser.arguments)


def read_calls(parser: CallParser, names: Collection[str] = (), *, in_list: bool = False) -> Steps[None]:
    """Read one call, or a list of calls. Raises Broken. With `names`, only an object that names one of them
    and has arguments is a call. `in_list`: the list's bracket was read."""
    yield from parser.skip()
    if not in_list and not (yield from parser.comes("[")):
        yield from _read_call(parser, names)
        return
    yield from parser.skip()
    while True:
        yield from _read_call(parser, names)
        parser.mark()
        yield from parser.skip()
        if not (yield from parser.comes(",")):
            break
        yield from parser.skip()
    yield from parser.expect("]")


def _read_call(parser: CallParser, names: Collection[str]) -> Steps[None]:
    """A call begins as soon as its name is known and its arguments begin; further fields are passed over."""
    name: str | None = None
    held: list[str] | None = None
    """Arguments that came before the name."""
    begun = False
    yield from parser.expect("{")
    yield from parser.skip()
    closed = yield from parser.comes("}")
    while not closed:
        key = yield from _read_string(parser)
        yield from parser.skip()
        yield from parser.expect(":")
        yield from parser.skip()
        if key == "name" and name is None:
            name = yield from _read_name(parser, names)
            if held is not None:
                begun = True
                _begin(parser, name, held)
        elif key in ("arguments", "parameters") and held is None and not begun:
            if name is None:
                held = []
                yield from _read_arguments(parser, None, held.append)
            else:
                begun = True
                yield from _read_arguments(parser, name, parser.arguments)
                parser.mark()
        else:
            yield from follow(parser, lambda _: None)
        yield from parser.skip()
        closed = yield from parser.comes("}")
        if not closed and not (yield from parser.comes(",")):
            break
        yield from parser.skip()
    if begun:
        return
    # A call of a tool that takes nothing may leave the arguments out.
    if not closed or name is None or names:
        raise Broken
    _begin(parser, name, ["{}"])


def _begin(parser: CallParser, name: str, arguments: list[str]) -> None:
    parser.begin(name)
    parser.arguments("".join(arguments))
    parser.mark()


def _read_name(parser: CallParser, names: Collection[str]) -> Steps[str]:
    name = yield from _read_string(parser)
    if not name or (names and name not in names) or not _is_utf8(name):
        raise Broken
    return name


def _read_arguments(parser: CallParser, name: str | None, give: Callable[[str], None]) -> Steps[None]:
    """An object, or JSON text of one. The call begins here, if its `name` is known."""
    if (yield from parser.peek()) == "{":
        if name is not None:
            parser.begin(name)
        yield from follow(parser, give)
        return
    text = _object_in((yield from _read_string(parser)))
    if name is not None:
        parser.begin(name)
    give(text)


def _object_in(text: str) -> str:
    """The JSON object that a string holds; {} in an empty one. Raises Broken."""
    text = text.strip() or "{}"
    pieces: list[str] = []
    follower = _Follower()
    if text[0] != "{" or follower.feed(text, pieces, ended=True) < len(text) or not follower.done:
        raise Broken
    if not _is_utf8(text):
        raise Broken
    return "".join(pieces)


def _is_utf8(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False
