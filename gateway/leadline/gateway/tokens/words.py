"""Token ids of short new texts from the words they are made of: most have been tokenized before.

Room: gateway/tokens. The library takes about a microsecond for each token of a text and some for every call;
looking up a word costs a fifth of one. Words are what lies between two cuts of segments.py's second kind, so
this is only for tokenizers with which those are safe (`Segmenter.words`):

    "What is the capital of Peru?"  ──▶  "What" " is" " the" " capital" " of" " Peru?"

A text with many unknown words goes to the library as a whole, and only some of its words are learned, so that
no text takes much longer than without the memo.
"""

import re
from array import array
from itertools import islice

from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["WordMemo"]

_cut = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])").split
_LONGEST_WORD = 32
"""Characters: what is longer is no word, and is not kept."""
_LEARNED = 8
"""Words of one text, at most."""


class WordMemo:
    """Word → its token ids. Not safe for threads. Bounded by the number of words, about 150 bytes each: when
    it is full it begins anew, which costs little, since the words in use are learned within seconds."""

    __slots__ = ("_known", "_most", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, most: int = 100_000) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._known: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def encode(self, text: str) -> tuple[bytes, int]:
        """(the ids of `text` without special tokens around it, as packed uint32; how many of its tokens came
        out of the tokenizer). Raises RequestError as `Tokenizer.encode_batch`."""
        known = self._known
        words = _cut(text)
        found = [known.get(word) for word in words]
        missing = [word for word, ids in zip(words, found, strict=True) if ids is None]
        if not missing:
            return b"".join(found), 0  # type: ignore[arg-type]
        if len(missing) > _LEARNED:
            self._learn(missing[:_LEARNED])
            (ids,) = self._tokenizer.encode_batch([text])
            return array("I", ids).tobytes(), len(ids)
        new = self._learn(missing)
        packed = [new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
        return b"".join(packed), sum(map(len, new.values())) // 4

    def _learn(self, words: list[str]) -> dict[str, bytes]:
        lists = self._tokenizer.encode_batch(words)
        new = {word: array("I", ids).tobytes() for word, ids in zip(words, lists, strict=True)}
        kept = {word: ids for word, ids in new.items() if len(word) <= _LONGEST_WORD}
        if len(self._known) + len(kept) > self._most:
            self._known.clear()
        self._known.update(islice(kept.items(), self._most))
        return new
