"""Checks `allowed_token_ids` and `bad_words`, and turns words into the token sequences that write them."""

from __future__ import annotations

from collections.abc import Iterable

from leadline.engine.errors import RequestError
from leadline.engine.sampling_params import SamplingParams
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["bad_word_ids", "check_bans"]

_MOST_WORDS = 1024
_LONGEST_WORD = 64
"""In tokens. Both bound the tables that the sampler keeps for a request."""


def bad_word_ids(words: Iterable[str | tuple[int, ...]], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that an output must not contain, as vLLM makes them: of each word
    without a space in front, and of the word behind a space where that has as many tokens and another first
    one. Raises RequestError for a word without tokens, and beyond the limits."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, tuple):
            forms = [word]
        elif len(word) > _LONGEST_WORD * tokenizer.pieces.longest:
            raise _wrong_length(f"more than {_LONGEST_WORD}")
        else:
            bare, spaced = (
                tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            )
            forms = [bare]
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                forms.append(spaced)
        for form in forms:
            if not 1 <= len(form) <= _LONGEST_WORD:
                raise _wrong_length(str(len(form)))
            found[form] = None
        if len(found) > _MOST_WORDS:
            raise RequestError(
                f"bad_words makes more than {_MOST_WORDS} sequences of tokens", param="bad_words"
            )
    return tuple(found)


def _wrong_length(tokens: str) -> RequestError:
    return RequestError(
        f"bad_words: each word must have 1 to {_LONGEST_WORD} tokens, got {tokens}", param="bad_words"
    )


def check_bans(sampling: SamplingParams, stop_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError where `allowed_token_ids` and `bad_words` (as sequences) stand beside a constraint
    of the output, name tokens that there are not, or may leave no token to sample. `stop_ids`: tokens that
    min_tokens may forbid."""
    allowed, words = sampling.allowed_token_ids, sampling.bad_words
    if allowed is None and not words:
        return
    param = "bad_words" if allowed is None else "allowed_token_ids"
    if sampling.structured is not None:
        raise RequestError(
            f"{param} cannot be combined with a constraint of the output, which allows and forbids tokens "
            "itself",
            param=param,
        )
    named = {"allowed_token_ids": allowed or (), "bad_words": [token for word in words for token in word]}
    for name, ids in named.items():
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}", param=name
                )
    forbidden = {word[-1] for word in words}
    if sampling.min_tokens:
        forbidden.update(stop_ids)
    if len(forbidden) >= vocab_size if allowed is None else forbidden.issuperset(allowed):
        raise RequestError(
            f"{param} leaves no token to sample: bad_words or min_tokens forbid the others", param=param
        )
