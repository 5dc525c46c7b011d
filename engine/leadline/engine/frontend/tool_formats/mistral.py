"""Mistral: a list of JSON calls, or each call behind a tag of its own.

    text[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]         up to tokenizer v7
    text[TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                          v11
    text[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{...}                    v11, Mistral Small 3.2
    text[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}              v13: Devstral, Magistral, Ministral 3

Which of them a model writes does not have to be known: all are read. An id that the model writes is the
call's.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import follow_object, read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["ARGUMENTS", "OPEN", "MistralParser", "rules"]

OPEN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    call_id = f"({grammar.tag(_ID)} /[A-Za-z0-9]{{1,64}}/)?"
    named = grammar.by_name(lambda name, arguments: f"{name} {call_id} {grammar.tag(ARGUMENTS)}? {arguments}")
    return f'{grammar.opening(OPEN)} (" "? {grammar.json_list("arguments")} | {named})'


class MistralParser(CallParser):
    def parse(self) -> Steps[None]:
        yield from self.content_until(OPEN)
        yield from self.skip()
        if (yield from self.ahead(1)) in ("[", "{"):
            yield from read_calls(self)
            return
        name = yield from self.name()
        yield from self.skip()
        call_id = None
        if (yield from self.comes(_ID)):
            call_id = yield from self.name()
            yield from self.skip()
        yield from self.comes(ARGUMENTS)
        yield from follow_object(self, name, call_id)
