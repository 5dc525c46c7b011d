"""Harmony (gpt-oss): a message to a function on the commentary channel.

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{...}<|call|>

The header names the recipient behind the channel or behind the role. OpenAI's guide allows both; the model
writes the first. Its prompt ends with `<|start|>assistant`, so an output may begin with the recipient.
Only messages to functions are read here; the parser of reasoning distinguishes the channels.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import ANY_TEXT, GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import follow_object
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["CALL", "CHANNEL", "CONSTRAIN", "MESSAGE", "START", "TO", "HarmonyParser", "rules", "start"]

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
CALL = "<|call|>"
_MESSAGE_END = "<|end|>"
TO = "to=functions."
_CHANNELS = ("commentary", "analysis")
_HEADERS = (
    *(f"{start}{CHANNEL}{channel} {TO}" for start in ("", f"{START}assistant") for channel in _CHANNELS),
    f"{START}assistant {TO}",
)
_LONGEST_HEADER = 128


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    start, channel, constrain, message = (grammar.tag(tag) for tag in (START, CHANNEL, CONSTRAIN, MESSAGE))
    header_ends, call = f'" "? ({constrain}? "json")? {message}', f"{grammar.tag(CALL)}?"
    in_channel = grammar.by_name(lambda name, arguments: f"{name} {header_ends} {arguments} {call}")
    in_role = grammar.by_name(
        lambda name, arguments: f'{name} {channel} "commentary" {header_ends} {arguments} {call}'
    )
    return f'({start} "assistant")? ({channel} "commentary {TO}" {in_channel} | " {TO}" {in_role})'


def start(grammar: CallGrammar) -> str:
    """See `ToolFormat.start`: messages, then calls."""
    begin, channel, message = (grammar.tag(tag) for tag in (START, CHANNEL, MESSAGE))
    header = f'({begin} "assistant")? {channel} /analysis|commentary|final/ {message}'
    messages = f"({header} {grammar.text_until(_MESSAGE_END)})*"
    return f"{messages} ({header} {ANY_TEXT} | call {grammar.more('call', GAP)})?"


class HarmonyParser(CallParser):
    def __init__(self) -> None:
        super().__init__()
        self._at_start = True

    def parse(self) -> Steps[None]:
        if not (self._at_start and (yield from self._starts_with_recipient())):
            yield from self.content_until(*_HEADERS)
        name = yield from self.name()
        for _ in range(_LONGEST_HEADER):
            if (yield from self.comes(MESSAGE)):
                break
            if not (yield from self.comes(CONSTRAIN)) and not (yield from self.comes(CHANNEL)):
                char = yield from self.peek()
                if not char.isalnum() and char != " ":
                    raise Broken
                self.take(1)
        yield from follow_object(self, name)
        yield from self.may_close(CALL)

    def _starts_with_recipient(self) -> Steps[bool]:
        self._at_start = False
        self.mark()
        yield from self.skip()
        if (yield from self.comes(TO)):
            return True
        self.unread()
        return False
