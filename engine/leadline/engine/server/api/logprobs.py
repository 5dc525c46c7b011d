"""Log-probabilities of the engine → the two forms of the OpenAI API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from leadline.engine.messages import TokenLogprobs
from leadline.protocol.openai.answers import (
    LOGPROB_FLOOR,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
)
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobsBuilder", "chat_logprobs", "prompt_logprobs"]


def chat_logprobs(
    entries: Sequence[TokenLogprobs], count: int, tokenizer: Tokenizer, *, as_ids: bool = False
) -> ChatLogprobs:
    """`count` is top_logprobs as asked for. `as_ids`: tokens are written as `token_id:123`."""
    name = _token_id if as_ids else tokenizer.token_str
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=name(entry.token_id),
                logprob=_floor(entry.logprob),
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    ChatTopLogprob(
                        token=name(token),
                        logprob=_floor(logprob),
                        bytes=list(tokenizer.token_bytes(token)),
                    )
                    for token, logprob in entry.top[:count]
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobsBuilder:
    """The columns of one choice, chunk by chunk: text_offset runs on from chunk to chunk.

    Offsets count characters. A token that ends inside a character starts where that character starts.
    """

    def __init__(self, count: int, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """`count` alternatives a token. `as_ids`: tokens are written as `token_id:123`."""
        self._count = count
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.pieces.errors)
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """These tokens come first, in columns of an earlier attempt."""
        for token_id in token_ids:
            self._advance(token_id)

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of an echoed prompt: `entries` are those of token_ids[1:]; the first token has no probability."""
        columns = CompletionLogprobs(top_logprobs=[])
        self._append(columns, token_ids[0], None)
        for entry in entries:
            self._append(columns, entry.token_id, entry)
        return columns

    def output(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        columns = CompletionLogprobs(top_logprobs=[])
        for entry in entries:
            self._append(columns, entry.token_id, entry)
        return columns

    def _advance(self, token_id: int) -> None:
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _append(self, columns: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None) -> None:
        columns.text_offset.append(self._offset)
        self._advance(token_id)
        columns.tokens.append(self._name(token_id))
        columns.token_logprobs.append(None if entry is None else _floor(entry.logprob))
        assert columns.top_logprobs is not None
        columns.top_logprobs.append(None if entry is None else self._top(entry))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one, which may be one more than asked for. OpenAI's shape is
        keyed by text; of tokens that read alike all but one (the chosen one, if it is among them) are keyed
        by id."""
        chosen = self._name(entry.token_id)
        others = [pair for pair in entry.top[: self._count] if pair[0] != entry.token_id]
        ranked = [
            (entry.token_id, entry.logprob),
            *others,
        ]  # as vLLM, in whose answers the chosen one is first
        top: dict[str, float] = {}
        for token, logprob in ranked:
            key = self._name(token)
            if key in top or (key == chosen and token != entry.token_id):
                key = _token_id(token)
            top[key] = _floor(logprob)
        return top

    def _name(self, token_id: int) -> str:
        return _token_id(token_id) if self._as_ids else _token_key(self._tokenizer.token_bytes(token_id))


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], count: int, tokenizer: Tokenizer
) -> list[dict[int, PromptLogprob] | None]:
    """Per prompt token: token id → its log probability, the prompt's own token among them; None for the
    first."""
    rows: list[dict[int, PromptLogprob] | None] = [None]
    for entry in entries:
        row = {
            token: PromptLogprob(logprob=_floor(logprob), rank=rank, decoded_token=tokenizer.token_str(token))
            for rank, (token, logprob) in enumerate(entry.top[:count], start=1)
        }
        row[entry.token_id] = PromptLogprob(
            logprob=_floor(entry.logprob),
            rank=entry.rank,
            decoded_token=tokenizer.token_str(entry.token_id),
        )
        rows.append(row)
    return rows


def _token_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _token_key(data: bytes) -> str:
    """A token as completions show it: its text, or its bytes (`bytes:\\xe6\\x9d`) where they are no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _floor(logprob: float) -> float:
    """JSON has no infinity, and a NaN would make the whole answer unreadable."""
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
