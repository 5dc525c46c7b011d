"""What every format of tool calls is built on: text that comes in pieces, read as if it were whole.

A format says how one stretch of output reads, as a generator that waits for more text by `yield`:

    class Brackets(CallParser):                       # text [call f {"a": 1}] more text
        def parse(self) -> Steps[None]:
            yield from self.content_until("[call ")   # content goes out as it comes
            name = yield from self.text_until(" ")
            self.begin(name)                          # id and name go out at once
            yield from follow(self, self.arguments)   # arguments piece by piece
            yield from self.closing("]")

The base class calls `parse` until the output has ended. What it reads of markup is held until `begin`: a
format that finds something else than a call raises `Broken`, and what was held is content, as it was written.
Behind `begin` the call stands; what no longer fits into it is content from there on. Whatever the pieces, the
results add up to the same, as long as a format reads by the methods here alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "Broken",
    "CallDelta",
    "CallParser",
    "ParsedText",
    "Steps",
    "ToolCall",
    "parse_whole",
    "partial_suffix",
]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads, and yields wherever it needs more text."""

_NAME_ENDS = " \t\r\n<>{}[]()\"'`,;="


@dataclass(slots=True)
class CallDelta:
    """A part of one call. `id` and `name` come with the first part of a call only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """To be appended; together they are JSON text of an object, unless the output was cut or broke off."""


@dataclass(slots=True)
class ToolCall:
    """The parts of one call put together."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedText:
    """What became final with one piece of text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""

    def add_to(self, calls: list[ToolCall]) -> None:
        """Put the parts to the calls that they belong to."""
        for part in self.calls:
            if part.id is not None and part.name is not None:
                calls.append(ToolCall(part.index, part.id, part.name, part.arguments))
            else:
                calls[part.index].arguments += part.arguments


class Broken(Exception):
    """The text at the present place is not what the markup asks for."""


class CallParser:
    """One output's parser. Feed it by `push`, then call `finish` once."""

    def __init__(self) -> None:
        self.ended = False
        """No more text will come."""
        self.new_call_id: Callable[[int], str] = _random_id
        """Makes the id of a call from its number in the output."""
        self._text = ""
        self._at = 0
        """Where reading goes on in `_text`."""
        self._dropped = 0
        """Characters that stood in front of `_text`."""
        self._mark: int | None = None
        """From where on `_text` is content if no call comes of it; None: all before `_at` is dealt with."""
        self._mark_in_call = False
        self._out = ParsedText()
        self._num_calls = 0
        self._given_ids: set[str] = set()
        self._after_call = False
        self._any_content = False
        self._steps = self._rounds()

    # For the caller

    def push(self, text: str) -> ParsedText:
        """Take in more text; returns what became final."""
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        self._dropped += keep
        if self._mark is not None:
            self._mark = 0
        self._out = ParsedText()
        next(self._steps, None)
        return self._out

    def finish(self) -> ParsedText:
        """The output has ended: give out what was held back."""
        self.ended = True
        return self.push("")

    # For formats

    def parse(self) -> Steps[None]:
        """Read some content and the calls behind it. Called again and again until the output has ended."""
        raise NotImplementedError

    def cut_short(self) -> None:
        """The output ended before a call had begun: what was held is content."""
        self._give_back()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins; what was held until here is its markup. `call_id`: the model's own, which is used
        unless an earlier call has it."""
        self._mark = None
        self._after_call = True
        if call_id is None or call_id in self._given_ids:
            call_id = self.new_call_id(self._num_calls)
        self._given_ids.add(call_id)
        self._out.calls.append(CallDelta(self._num_calls, call_id, name))
        self._num_calls += 1

    def arguments(self, piece: str) -> None:
        """More of the present call's arguments."""
        calls, index = self._out.calls, self._num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1].arguments += piece
        elif piece:
            calls.append(CallDelta(index, arguments=piece))

    @property
    def calls_begun(self) -> int:
        return self._num_calls

    def mark(self, *, in_call: bool = False) -> None:
        """Hold what is read from here on, until `begin` or `accept`. `in_call`: it is markup within a call;
        if the output is cut there, it is dropped."""
        self._mark, self._mark_in_call = self._at, in_call

    def accept(self) -> None:
        """What was held is markup of the call that has begun."""
        self._mark = None

    def unread(self) -> None:
        """Go back to the mark."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def content_until(self, *tags: str) -> Steps[str]:
        """Pass content on until one of `tags`, which is read and held. White space in front of it belongs to
        the markup, as does that behind a call. Never returns if no tag comes."""
        seen = self._at  # no tag begins before it, and only white space was held
        while True:
            found = min(((at, tag) for tag in tags if (at := self._text.find(tag, seen)) >= 0), default=None)
            held = (
                0 if self.ended else max((partial_suffix(self._text, tag, seen) for tag in tags), default=0)
            )
            stop = found[0] if found else len(self._text) - held
            if new := self._text[seen:stop].rstrip():
                self._emit(self._text[self._at : seen + len(new)])
                self._at = seen + len(new)
            if found:
                self.mark()
                self._at = found[0] + len(found[1])
                return found[1]
            if self.ended:
                if not self._after_call:
                    self._out.content += self._text[self._at :]
                self._at = len(self._text)
                raise Broken
            waiting = stop - self._at
            yield
            seen = self._at + waiting

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str = " \t\r\n") -> Steps[None]:
        """Read past any of `characters`."""
        while (char := (yield from self.peek())) and char in characters:
            self._at += 1

    def expect(self, text: str) -> Steps[None]:
        """Read exactly this. Raises Broken."""
        if not (yield from self.comes(text)):
            raise Broken

    def comes(self, text: str) -> Steps[bool]:
        """Whether exactly this comes next; it is read if so."""
        while True:
            if self._text.startswith(text, self._at):
                self._at += len(text)
                return True
            if self.ended or not text.startswith(self._text[self._at : self._at + len(text)]):
                return False
            yield

    def closing(self, tag: str) -> Steps[None]:
        """Read the tag behind a call, white space before it included. An output may end in front of it, or
        within it. Raises Broken."""
        yield from self.skip()
        if (yield from self.comes(tag)):
            return
        if not (self.ended and tag.startswith(self._text[self._at :])):
            raise Broken
        self._at = len(self._text)

    def text_until(self, tag: str) -> Steps[str]:
        """The text in front of `tag`, which is read too. All of it is held. Raises Broken if none comes."""
        assert self._mark is not None
        before = self._at - self._mark
        while True:
            start = self._mark + before
            found = self._text.find(tag, start)
            if found >= 0:
                self._at = found + len(tag)
                return self._text[start:found]
            self._at = len(self._text)
            if self.ended:
                raise Broken
            yield

    def calls_up_to(self, end: str, opening: str, read_call: Callable[[], Steps[None]]) -> Steps[None]:
        """Read the calls of a section whose first `opening` tag was read: each by `read_call`, then the tag
        `end` if it comes."""
        more = True
        while more:
            yield from read_call()
            self.mark()
            yield from self.skip()
            more = yield from self.comes(opening)
        self.unread()
        yield from self.may_close(end)

    def may_close(self, tag: str) -> Steps[None]:
        """Read the tag behind a call if it comes, white space before it included."""
        self.mark()
        try:
            yield from self.closing(tag)
            self.accept()
        except Broken:
            self.unread()

    def pass_until(self, give: Callable[[str], None], *tags: str) -> Steps[str]:
        """Give text out as it comes until one of `tags`, which is read. Raises Broken if none comes, once all
        of the text was given out."""
        while True:
            found = min(
                ((at, tag) for tag in tags if (at := self._text.find(tag, self._at)) >= 0), default=None
            )
            held = 0 if self.ended else max(partial_suffix(self._text, tag, self._at) for tag in tags)
            stop = found[0] if found else len(self._text) - held
            if stop > self._at:
                give(self._text[self._at : stop])
                self._at = stop
            if found:
                self._at += len(found[1])
                return found[1]
            if self.ended:
                raise Broken
            yield

    def run_of(self, stops: str, longest: int = 256) -> Steps[str]:
        """The characters up to one of `stops` or the end; they are not read. Raises Broken for more than
        `longest`."""
        while True:
            text = self._text[self._at : self._at + longest + 1]
            end = next((at for at, char in enumerate(text) if char in stops), None)
            if end is not None:
                return text[:end]
            if len(text) > longest:
                raise Broken
            if self.ended:
                return text
            yield

    def name(self, stops: str = _NAME_ENDS) -> Steps[str]:
        """Read the name of a function or a parameter. Raises Broken if there is none."""
        name = yield from self.run_of(stops)
        if not name:
            raise Broken
        self._at += len(name)
        return name

    def ahead(self, count: int) -> Steps[str]:
        """The next `count` characters, fewer at the end; they are not read."""
        while len(self._text) < self._at + count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def unread_text(self) -> str:
        """What has come and was not read. Follow it with `take`."""
        return self._text[self._at :]

    def take(self, count: int) -> None:
        """Read so many characters of `unread_text`."""
        self._at += count

    # Inside

    def _rounds(self) -> Steps[None]:
        while not (self.ended and self._at == len(self._text)):
            before = self._dropped + self._at
            try:
                yield from self.parse()
            except Broken:
                if self._mark is not None and self.ended and self._at == len(self._text):
                    if not self._mark_in_call:
                        self.cut_short()
                else:
                    self._give_back()
            self._mark = None
            if self._dropped + self._at == before and self._at < len(self._text):
                # A format that read nothing would read nothing again, without end.
                self._emit(self._text[self._at])
                self._at += 1

    def _give_back(self) -> None:
        """What is held is content after all."""
        if self._mark is not None and self._at > self._mark:
            self._out.content += self._text[self._mark : self._at]
            self._after_call, self._any_content = False, True
        self._mark = None

    def _emit(self, content: str) -> None:
        if self._after_call and not self._any_content:
            content = content.lstrip()
        if content:
            self._out.content += content
            self._after_call, self._any_content = False, True


def _random_id(number: int) -> str:
    return "call_" + secrets.token_hex(12)


def parse_whole(parser: CallParser, text: str) -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole output, by a fresh parser."""
    calls: list[ToolCall] = []
    parts = (parser.push(text), parser.finish())
    for part in parts:
        part.add_to(calls)
    return "".join(part.content for part in parts), calls


def partial_suffix(text: str, tag: str, start: int) -> int:
    """Return the length of the longest proper prefix of `tag` that `text` ends with, from `start` on."""
    at = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while at >= 0 and not tag.startswith(text[at:]):
        at = text.find(tag[0], at + 1)
    return len(text) - at if at >= 0 else 0
