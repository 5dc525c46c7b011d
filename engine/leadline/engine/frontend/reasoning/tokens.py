"""A format's markup in a model's tokens: what the engine core needs to follow a thought."""

from __future__ import annotations

from typing import Literal

import msgspec

from leadline.engine.frontend.reasoning.formats import Begins, ReasoningFormat
from leadline.engine.messages import ThoughtSpec
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ModelReasoning", "thought_spec"]


def thought_spec(
    form: ReasoningFormat, tokenizer: Tokenizer, begins: Literal["inside", "open"]
) -> ThoughtSpec | None:
    """Return the thought of an output that begins there.

    None where the tags are not tokens of their own, as they are for every model that was trained to think:
    then the text that ends the thought has many tokenizations.
    """
    if any(tokenizer.token_id(tag) is None for tag in form.tags):
        return None

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, False))

    answers = tuple(map(ids, form.answers))
    opened_by_model: Literal["between", "maybe"] = "between" if answers else "maybe"
    blanks = [] if begins == "inside" or answers else range(tokenizer.vocab_size)
    return ThoughtSpec(
        begins="inside" if begins == "inside" else opened_by_model,
        heading=ids(form.heading),
        blanks=tuple(token for token in blanks if tokenizer.token_bytes(token).isspace()),
        ends=(ids(form.closing),),
        opens=(ids(form.opening),),
        answers=answers,
        closing=ids(form.forced),
    )


class ModelReasoning:
    """How one model thinks: its format, and the format's markup in its tokens.

    Attributes:
        form: the format.
        hidden: the markup is in the text only with `skip_special_tokens` off.
    """

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer) -> None:
        self.form = form
        self.hidden = form.is_hidden(tokenizer)
        self._specs: dict[Begins, ThoughtSpec | None] = {
            "inside": thought_spec(form, tokenizer, "inside"),
            "open": thought_spec(form, tokenizer, "open"),
        }

    def spec(self, begins: Begins, budget: int | None = None) -> ThoughtSpec | None:
        """The thought of an output that begins there; None behind it, and where the tags are not tokens."""
        spec = self._specs.get(begins)
        return spec if spec is None or budget is None else msgspec.structs.replace(spec, budget=budget)
