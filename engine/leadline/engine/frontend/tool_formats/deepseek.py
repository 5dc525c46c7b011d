"""DeepSeek V3, R1 and V3.1.

    text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.
The parser tells the two forms apart by the text behind the separator. The tag around all calls may
be missing.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import follow_object
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["ALL", "CLOSE", "END", "OPEN", "SEPARATOR", "DeepSeekParser", "rules"]

OPEN = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
CLOSE = "<｜tool▁call▁end｜>"
ALL = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    separator = grammar.tag(SEPARATOR)
    named = grammar.by_name(
        lambda name, arguments: (
            f"({name} {separator} {arguments} "
            f'| "function" {separator} {name} "\\n```json\\n" {arguments} "\\n```") {grammar.tag(CLOSE)}'
        )
    )
    call = f"{grammar.tag(OPEN)} {named}"
    return f"{grammar.opening(ALL)} {GAP} {call} {grammar.more(call, GAP)} {GAP} {grammar.tag(END)}"


class DeepSeekParser(CallParser):
    def parse(self) -> Steps[None]:
        if (yield from self.content_until(ALL, OPEN)) == ALL:
            yield from self.skip()
            yield from self.expect(OPEN)
        yield from self.calls_up_to(END, OPEN, self._call)

    def _call(self) -> Steps[None]:
        yield from self.skip()
        name = yield from self.name()
        yield from self.skip()
        yield from self.expect(SEPARATOR)
        yield from self.skip()
        fenced = False
        if (yield from self.peek()) != "{":
            name = yield from self.name()
            yield from self.skip()
            fenced = yield from self.comes("```")
            yield from self.comes("json")
        yield from follow_object(self, name)
        if fenced:
            yield from self.may_close("```")
        yield from self.may_close(CLOSE)
