"""Kimi K2: an id that names the function, then JSON.

    text<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
    <|tool_call_end|><|tool_calls_section_end|>

The id is the call's: the template writes it again in the next turn, and the model counts on from it. The
model may leave `functions.` or the tag around all calls out.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import follow_object
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["ALL", "ARGUMENTS", "CLOSE", "END", "OPEN", "KimiK2Parser", "rules"]

OPEN = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CLOSE = "<|tool_call_end|>"
ALL = "<|tool_calls_section_begin|>"
END = "<|tool_calls_section_end|>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    named = grammar.by_name(
        lambda name, arguments: (
            f'"functions." {name} ":" /[0-9]{{1,4}}/ {GAP} {grammar.tag(ARGUMENTS)} {GAP} {arguments}'
        )
    )
    call = f"{grammar.tag(OPEN)} {GAP} {named} {GAP} {grammar.tag(CLOSE)}"
    return f"{grammar.opening(ALL)} {GAP} {call} {grammar.more(call, GAP)} {GAP} {grammar.tag(END)}"


class KimiK2Parser(CallParser):
    def parse(self) -> Steps[None]:
        if (yield from self.content_until(ALL, OPEN)) == ALL:
            yield from self.skip()
            yield from self.expect(OPEN)
        yield from self.calls_up_to(END, OPEN, self._call)

    def _call(self) -> Steps[None]:
        yield from self.skip()
        call_id = yield from self.name()
        yield from self.skip()
        yield from self.expect(ARGUMENTS)
        name, colon, number = call_id.removeprefix("functions.").rpartition(":")
        if colon and name and number.isdecimal():
            yield from follow_object(self, name, call_id)
        else:
            yield from follow_object(self, call_id.removeprefix("functions."))
        yield from self.may_close(CLOSE)
