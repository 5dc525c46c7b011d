"""A thought between two tags: `<think>` and `</think>`, `[THINK]` and `[/THINK]`, Gemma 4's channel.

    <think>Two and two ...</think>\\n\\nIt is four.      the model writes both tags
    Two and two ...</think>\\n\\nIt is four.             the prompt ends with the opening tag

Only a tag at the start opens a thought: later ones are words of the answer. Where tags are special tokens
that no text can hold (`anywhere`), there may be further thoughts.
"""

from __future__ import annotations

from leadline.engine.frontend.reasoning.parser import Field, ReasoningParser
from leadline.engine.frontend.tool_formats.parser import Steps

__all__ = ["TagParser"]


class TagParser(ReasoningParser):
    """`inside`: the output begins within the thought. `label`: a word behind the opening tag that is no part
    of the thought."""

    def __init__(
        self, opening: str, closing: str, *, inside: bool, label: str = "", anywhere: bool = False
    ) -> None:
        super().__init__()
        self.thinking = inside
        self._opening = opening
        self._closing = closing
        self._label = label
        self._label_may_come = not inside
        self._anywhere = anywhere
        self._at_start = not inside
        self._answering = False
        """Whatever follows is the answer."""

    def plain(self, text: str) -> Field | None:
        if self._at < len(self._text):
            return None
        if self._answering:
            return "content"
        # Blanks at either end of a thought are not part of it.
        flows = self.thinking and bool(self._out.reasoning) and bool(text) and not text[-1].isspace()
        return "reasoning" if flows and self._closing[0] not in text else None

    def parse(self) -> Steps[None]:
        if self.thinking:
            yield from self._thought()
        elif self._at_start:
            self._at_start = False
            self.mark()
            yield from self.skip()
            if (yield from self.comes(self._opening)):
                self._open()
            else:
                self.unread()
        elif self._anywhere:
            if (yield from self.rest_until(self._opening)):
                self._open()
        else:
            self._answering = True
            yield from self.rest_until()

    def _open(self) -> None:
        self._mark = None
        self.thinking = self._label_may_come = True

    def _thought(self) -> Steps[None]:
        if self._label and self._label_may_come:
            self._label_may_come = False
            self.mark()
            if not (yield from self.comes(self._label)):
                self.unread()
            self._mark = None
        if (yield from self.thought_until(self._closing)):
            self.thinking = False
            yield from self.skip()
