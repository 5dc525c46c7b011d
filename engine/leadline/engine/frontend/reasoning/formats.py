"""The reasoning formats, one row each, and how a model's chat template tells which is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leadline.engine.frontend.reasoning import harmony
from leadline.engine.frontend.reasoning.harmony import HarmonyParser
from leadline.engine.frontend.reasoning.parser import ReasoningParser
from leadline.engine.frontend.reasoning.tags import TagParser
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["FORMATS", "Begins", "ReasoningFormat", "detect_format"]

Begins = Literal["inside", "open", "answer"]
"""Where the output begins: inside a thought, where the model may open one, or behind it (or without one)."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One way in which models write thoughts."""

    name: str
    parser: Callable[[Begins], ReasoningParser]
    shown_in: Callable[[str], bool]
    """Whether a chat template shows the model this format."""
    opening: str
    """Begins a thought."""
    closing: str
    """Ends a thought."""
    inside: tuple[str, ...]
    """Ends of prompts whose output begins inside a thought, white space aside."""
    answering: tuple[str, ...]
    """Ends of prompts whose output begins behind it."""
    tags: tuple[str, ...]
    """Markup that may be special tokens of a model; its output must show them then."""
    answers: tuple[str, ...] = ()
    """Markup that begins the answer, where the end of a thought alone does not."""
    heading: str = ""
    """Markup between the end of one message and the opening of the next."""
    forced: str = ""
    """What ends a thought that has reached its budget."""

    def is_hidden(self, tokenizer: Tokenizer) -> bool:
        """Whether the markup is in the text only with `skip_special_tokens` off."""
        return any(tokenizer.token_id(tag) in tokenizer.special_ids for tag in self.tags)

    def begins(self, prompt: str, continued: str | None = None) -> Begins:
        """Where the output of a rendered prompt begins. `continued`: the text of the message that the output
        continues."""
        end = prompt.rstrip()
        if end.endswith(self.inside):
            return "inside"
        if continued is not None:
            return "inside" if continued.rfind(self.opening) > continued.rfind(self.closing) else "answer"
        return "answer" if end.endswith(self.answering) else "open"


def _between(
    name: str, opening: str, closing: str, shown_in: Callable[[str], bool], *, label: str = "", anywhere: bool
) -> ReasoningFormat:
    return ReasoningFormat(
        name,
        parser=lambda begins: TagParser(
            opening, closing, inside=begins == "inside", label=label, anywhere=anywhere
        ),
        shown_in=shown_in,
        opening=opening,
        closing=closing,
        inside=(opening, (opening + label).rstrip()),
        answering=(closing,),
        tags=(opening, closing),
        forced=f"\n{closing}",
    )


def _harmony_parser(begins: Begins) -> ReasoningParser:
    places: dict[Begins, Literal["header", "analysis", "answer"]] = {"inside": "analysis", "answer": "answer"}
    return HarmonyParser(places.get(begins, "header"))


HARMONY = ReasoningFormat(
    "harmony",
    parser=_harmony_parser,
    shown_in=lambda template: harmony.CHANNEL in template and harmony.START in template,
    opening=f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
    closing=harmony.END,
    inside=(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
    answering=(harmony.FINAL,),
    tags=(harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END),
    answers=(harmony.FINAL, f"{harmony.CHANNEL}final <|constrain|>json{harmony.MESSAGE}"),
    heading=f"{harmony.START}assistant",
    forced=f"{harmony.END}{harmony.START}assistant{harmony.FINAL}",
)
GEMMA4 = _between(
    "gemma4",
    "<|channel>",
    "<channel|>",
    lambda template: "<|channel>" in template,
    label="thought\n",
    anywhere=True,
)
MISTRAL = _between("mistral", "[THINK]", "[/THINK]", lambda template: "[THINK]" in template, anywhere=False)
THINK = _between(
    "think",
    "<think>",
    "</think>",
    lambda template: "<think>" in template or "</think>" in template,
    anywhere=False,
)
FORMATS = (HARMONY, GEMMA4, MISTRAL, THINK)
"""The first that a template shows is a model's."""


def detect_format(chat_template: str | None, named: str = "auto") -> ReasoningFormat | None:
    """The format that a model writes, by its template; or the one of this name. None: the model writes no
    thoughts. Raises KeyError for an unknown name."""
    if named == "auto":
        return next((one for one in FORMATS if one.shown_in(chat_template or "")), None)
    return None if named == "none" else {one.name: one for one in FORMATS}[named]
