"""Calls that the caller insists on: `tool_choice` "required" or a named function.

The output is held to bare JSON by a grammar: a list of calls, or the arguments of the named function.
"""

from __future__ import annotations

from collections.abc import Sequence

from leadline.engine.frontend.tool_formats.json_calls import follow, read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["NamedCallParser", "RequiredCallParser"]


class NamedCallParser(CallParser):
    """The output is arguments of the function `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def parse(self) -> Steps[None]:
        if not self.calls_begun:
            yield from self.skip()
            if not (yield from self.peek()):
                return
            self.begin(self._name)
            yield from follow(self, self.arguments)
        yield from self.content_until()


class RequiredCallParser(CallParser):
    """The output is a list of calls of the functions `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._at_start = True

    def parse(self) -> Steps[None]:
        if self._at_start:
            self._at_start = False
            self.mark()
            yield from read_calls(self)
        yield from self.content_until()

    def cut_short(self) -> None:
        """The beginning of a call is no content. It names its function where there is one alone."""
        if not self.calls_begun and len(self._names) == 1:
            self.begin(self._names[0])
