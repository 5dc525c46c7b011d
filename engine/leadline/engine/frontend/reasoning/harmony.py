"""Harmony, the messages of gpt-oss:

    <|channel|>analysis<|message|>Two and two ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is four.<|return|>

The prompt ends with `<|start|>assistant`. Messages of the channel `analysis` are reasoning. A message to a
function is passed on with its markup, for the parser of tool calls. Every other message is content.
"""

from __future__ import annotations

from typing import Literal

from leadline.engine.frontend.reasoning.parser import ReasoningParser
from leadline.engine.frontend.tool_formats.parser import Broken, Steps

__all__ = ["CHANNEL", "END", "FINAL", "MESSAGE", "START", "HarmonyParser"]

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
_ENDS = (END, "<|call|>", "<|return|>", START)
_LONGEST_HEADER = 400

_Place = Literal["header", "analysis", "answer"]


class HarmonyParser(ReasoningParser):
    """`place`: where in a message the output begins."""

    def __init__(self, place: _Place = "header") -> None:
        super().__init__()
        self._place: _Place = place
        self.thinking = place == "analysis"
        self._any_reasoning = False
        self._any_answer = False

    def parse(self) -> Steps[None]:
        place, self._place = self._place, "header"
        if place == "header":
            yield from self._message()
        elif place == "analysis":
            yield from self._analysis()
        else:
            yield from self._answer()

    def cut_short(self) -> None:
        """A header that the end of the output cuts is markup, not content."""
        assert self._mark is not None
        if not self._text[self._mark :].lstrip().startswith("<"):
            super().cut_short()

    def _message(self) -> Steps[None]:
        self.mark()
        yield from self.skip()
        if not (yield from self._header_begins()):
            self.unread()
            yield from self._answer()
            return
        header = yield from self._header()
        channel = header.partition(CHANNEL)[2].split("<", 1)[0].split()
        if "to=functions." in header:
            self._mark = None
            self._out.content += header + MESSAGE
            tag = yield from self.rest_until(*_ENDS[:3])
            self._out.content += tag
        elif channel[:1] == ["analysis"] or "to=" in header:
            self._mark = None
            yield from self._analysis()
        else:
            self._mark = None
            yield from self._answer()

    def _header_begins(self) -> Steps[bool]:
        assert self._mark is not None
        for beginning in (START, CHANNEL, "to="):
            if (yield from self.comes(beginning)):
                return True
        return False

    def _header(self) -> Steps[str]:
        """All of the header in front of `<|message|>`, which is read too. Raises Broken if none comes."""
        assert self._mark is not None
        while True:
            unread = self._text[self._mark :]
            header, found, _ = unread.partition(MESSAGE)
            if found or len(unread) > _LONGEST_HEADER or self.ended:
                break
            yield
        self._at = self._mark + len(header) + len(found)
        if not found:
            raise Broken
        return header

    def _analysis(self) -> Steps[None]:
        self.thinking = True
        yield from self.skip()
        if self._any_reasoning and (yield from self.peek()):
            self._out.reasoning += "\n\n"
        self._any_reasoning = True
        if self._is_end((yield from self.thought_until(*_ENDS))):
            self.thinking = False

    def _answer(self) -> Steps[None]:
        if self._any_answer and (yield from self.peek()):
            self._out.content += "\n\n"
        self._any_answer = True
        self._is_end((yield from self.rest_until(*_ENDS)))

    def _is_end(self, tag: str) -> bool:
        """Whether a message has ended. The beginning of the next one stays unread."""
        if tag == START:
            self._at -= len(START)
        return bool(tag)
