"""Prompts for a text between two others (`suffix`), in the form that the model was trained on.

The tokenizer's own markers tell the form; a tokenizer that has none of them belongs to a model that cannot do
it.

    Qwen2.5-Coder, CodeGemma    <|fim_prefix|> before <|fim_suffix|> after <|fim_middle|>
    StarCoder, Granite Code     <fim_prefix> before <fim_suffix> after <fim_middle>
    DeepSeek-Coder              <｜fim▁begin｜> before <｜fim▁hole｜> after <｜fim▁end｜>
    CodeLlama                   ▁<PRE> before ▁<SUF> after ▁<MID>
    Codestral                   [SUFFIX] after [PREFIX] before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leadline.protocol.errors import RequestError
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["infill_ends", "infill_ids"]

_LETTER = "☺"
"""Encoded in front of a text so that a SentencePiece tokenizer puts no space there, and left out again."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Markers as the vocabulary has them. Without `middle` the text before comes last."""

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    """Further tokens that end the text between."""

    def markers(self, tokenizer: Tokenizer) -> list[int] | None:
        """Ids of the markers; None where the tokenizer has not got them all."""
        ids = [tokenizer.token_id(name) for name in (self.prefix, self.suffix, self.middle) if name]
        return None if None in ids else [token for token in ids if token is not None]


_FORMS = (
    _Form(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    _Form("[PREFIX]", "[SUFFIX]", ends=("[MIDDLE]",)),
)


def infill_ids(before: str | Sequence[int], after: str, tokenizer: Tokenizer, *, special: bool) -> list[int]:
    """Return the prompt for the text between `before`, which may be token ids, and `after`. `special`: with
    the model's BOS in front. Raises RequestError for a model that has no form."""
    form, markers = _form_of(tokenizer)
    first = tokenizer.encode(before, add_special_tokens=False) if isinstance(before, str) else list(before)
    bos = tokenizer.encode("", add_special_tokens=True)[:1] if special else []
    start = bos if bos == [tokenizer.bos_token_id] else []
    second = _without_space(after, tokenizer)
    if not form.middle:
        return [*start, markers[1], *second, markers[0], *first]
    return [*start, markers[0], *first, markers[1], *second, markers[2]]


def infill_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end the text between, beside the model's own. Raises as `infill_ids`."""
    form, markers = _form_of(tokenizer)
    ends = [tokenizer.token_id(name) for name in form.ends]
    return (*markers, *(token for token in ends if token is not None))


def _form_of(tokenizer: Tokenizer) -> tuple[_Form, list[int]]:
    for form in _FORMS:
        if (markers := form.markers(tokenizer)) is not None:
            return form, markers
    raise RequestError(
        "suffix needs a model with fill-in-the-middle tokens, and this one has none", param="suffix"
    )


def _without_space(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text that follows another one, so that no space is put in front of it."""
    letter = tokenizer.encode(_LETTER, add_special_tokens=False)
    ids = tokenizer.encode(_LETTER + text, add_special_tokens=False)
    if ids[: len(letter)] == letter:
        return ids[len(letter) :]
    return tokenizer.encode(text, add_special_tokens=False)
