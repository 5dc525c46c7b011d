"""The base of all reasoning formats: output in pieces in, reasoning and the rest out.

A format is a `CallParser` that finds thoughts in place of calls: it reads by the same methods, waits by
`yield`, and holds what may become a tag. What it gives out as `content` is the rest: the answer as the model
wrote it, calls included, for the parser of tool calls to read.
"""

from __future__ import annotations

from typing import Literal

from leadline.engine.frontend.tool_formats.parser import CallParser, ParsedText, Steps, partial_suffix

__all__ = ["Field", "OutputParser", "ReasoningParser"]

Field = Literal["content", "reasoning"]


class ReasoningParser(CallParser):
    """Splits one output into reasoning and the rest."""

    thinking = False
    """The text read last belongs to a thought or to its tags."""

    def plain(self, text: str) -> Field | None:
        """Return the field to which `text`, if it came next, would go as it is. The caller then need not push
        it. None where it must be pushed."""
        return None

    def thought_until(self, *tags: str) -> Steps[str]:
        """Pass reasoning on until one of `tags`, which is read. Returns that tag, or "" at the end of the
        output. White space at both ends of the thought is left out."""
        yield from self.skip()
        while True:
            found, stop = self._look_for(tags)
            if new := self._text[self._at : stop].rstrip():
                self._out.reasoning += new
                self._at += len(new)
            if found or self.ended:
                self._at = stop + len(found)
                return found
            yield

    def rest_until(self, *tags: str) -> Steps[str]:
        """Pass the rest on until one of `tags`, which is read. Returns that tag, or "" at the end of the
        output."""
        while True:
            found, stop = self._look_for(tags)
            self._out.content += self._text[self._at : stop]
            self._at = stop + len(found)
            if found or self.ended:
                return found
            yield

    def _look_for(self, tags: tuple[str, ...]) -> tuple[str, int]:
        """The first tag in the text, and where it begins; "" and where a tag may begin, if none is there."""
        found = min(((at, tag) for tag in tags if (at := self._text.find(tag, self._at)) >= 0), default=None)
        if found is not None:
            return found[1], found[0]
        if self.ended:
            return "", len(self._text)
        held = max((partial_suffix(self._text, tag, self._at) for tag in tags), default=0)
        return "", len(self._text) - held


class OutputParser:
    """One output's parsers, one behind the other: reasoning first, then calls in the rest.

    Either may be None. Feed it by `push`, then call `finish` once.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def thinking(self) -> bool:
        """Whether the text read last belongs to a thought or to its tags."""
        return self._reasoning is not None and self._reasoning.thinking

    def plain(self, text: str) -> Field | None:
        """See `ReasoningParser.plain`."""
        return None if self._reasoning is None or self._calls is not None else self._reasoning.plain(text)

    def push(self, text: str) -> ParsedText:
        """Take in more text; return what became final."""
        if self._reasoning is None:
            return ParsedText(text) if self._calls is None else self._calls.push(text)
        return self._pass_on(self._reasoning.push(text))

    def finish(self) -> ParsedText:
        """End the output; return what was held back."""
        parsed = ParsedText() if self._reasoning is None else self._pass_on(self._reasoning.finish())
        if self._calls is not None:
            tail = self._calls.finish()
            parsed.content += tail.content
            parsed.calls += tail.calls
        return parsed

    def _pass_on(self, parsed: ParsedText) -> ParsedText:
        if self._calls is None or not parsed.content:
            return parsed
        rest = self._calls.push(parsed.content)
        rest.reasoning = parsed.reasoning
        return rest
