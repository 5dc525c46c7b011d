"""Segments of texts: remembered ones, those being tokenized for another request, and new ones.

Owns the memo of segments and the threads. A little new text is tokenized on the event
loop; more of it in threads (the library releases the GIL), once even if many requests ask for the same text
at the same time.
"""

import asyncio
import re
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar, TypeVarTuple

from leadline.gateway.tokens.memo import Segment, SegmentMemo
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["INLINE_CHARACTERS", "SegmentEncoder", "TokenCounts", "WordMemo"]


_cut = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])").split
_LONGEST_WORD = 32
"""Characters: what is longer is no word, and is not kept."""
_LEARNED = 8
"""Words of one text, at most."""


class WordMemo:
    """Word → its token ids, for short new texts: most words have been tokenized before. Not safe for threads.

    The library takes about a microsecond for each token of a text and some for every call; looking up a word
    costs a fifth of one. Words lie between two cuts of segments.py's second kind, so this is only for
    tokenizers with which those are safe (`Segmenter.words`):

        "What is the capital of Peru?"  ──▶  "What" " is" " the" " capital" " of" " Peru?"

    A text with many unknown words goes to the library as a whole, and only some of its words are learned, so
    that no text takes much longer than without the memo. Bounded by the number of words, about 150 bytes
    each: a full memo is emptied, which costs little, since the words in use are learned again within seconds.
    """

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


T = TypeVar("T")
Args = TypeVarTuple("Args")

INLINE_CHARACTERS = 4096
"""New text up to this length is tokenized on the event loop: about a millisecond."""


@dataclass(slots=True)
class TokenCounts:
    """What the memo did so far."""

    encoded: int = 0
    """Tokens that came out of the tokenizer."""
    reused: int = 0
    """Tokens that were remembered."""


class SegmentEncoder:
    """Text → Segment, for one tokenizer. Bookkeeping happens on the event loop it lives on."""

    def __init__(self, tokenizer: Tokenizer, memo_bytes: int, threads: int, *, words: bool) -> None:
        """`words`: texts may be put together from words (`Segmenter.words`)."""
        self.counts = TokenCounts()
        self._tokenizer = tokenizer
        self._memo = SegmentMemo(memo_bytes)
        self._words = WordMemo(tokenizer) if words else None
        self._width = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._encoding: dict[str, asyncio.Task[dict[str, Segment]]] = {}
        """Texts being tokenized right now → the task that has them."""

    def close(self) -> None:
        """End the threads; what is being tokenized is finished first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def used_bytes(self) -> int:
        return self._memo.used_bytes

    def of_ids(self, packed: bytes) -> Segment:
        """The segment of these very ids."""
        return self._memo.of_ids(packed)

    def at_once(self, texts: Sequence[str]) -> list[Segment] | None:
        """Their segments, in order, on the spot; None if much of them is new. Raises RequestError."""
        found = [self._memo.get(text) for text in texts]
        missing = [text for text, segment in zip(texts, found, strict=True) if segment is None]
        if not missing:
            new: dict[str, Segment] = {}
        elif sum(map(len, missing)) <= 2 * INLINE_CHARACTERS:
            new = self._encode_now(missing)
        else:
            return None
        segments = [segment or new[text] for text, segment in zip(texts, found, strict=True)]
        self.counts.reused += sum([segment.num_tokens for segment in found if segment is not None])
        return segments

    async def segments(self, texts: set[str]) -> dict[str, Segment]:
        """Segments of texts: remembered ones, ones that others are waiting for, and new ones."""
        found: dict[str, Segment] = {}
        missing: list[str] = []
        for text in texts:
            segment = self._memo.get(text)
            if segment is None:
                missing.append(text)
            else:
                found[text] = segment
                self.counts.reused += segment.num_tokens
        if not missing:
            return found
        if sum(map(len, missing)) <= INLINE_CHARACTERS:
            return found | self._encode_now(missing)
        mine = [text for text in missing if text not in self._encoding]
        tasks = {self._encoding[text] for text in missing if text in self._encoding}
        if mine:
            task = asyncio.create_task(self._encode(mine))
            task.add_done_callback(_look_at_the_error)
            self._encoding.update(dict.fromkeys(mine, task))
            tasks.add(task)
        for task in tasks:
            # Shielded: one client that leaves must not take the work from the others.
            done = await asyncio.shield(task)
            found.update((text, done[text]) for text in missing if text in done)
        return found

    async def in_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    # -- inside ----------------------------------------------------------------------------------------------

    def _encode_now(self, texts: list[str]) -> dict[str, Segment]:
        if self._words is None:
            return self._remember(texts, self._tokenizer.encode_batch(texts))
        segments = {}
        for text in texts:
            packed, encoded = self._words.encode(text)
            self.counts.encoded += encoded
            self.counts.reused += len(packed) // 4 - encoded
            segments[text] = self._memo.add(text, packed)
        return segments

    async def _encode(self, texts: list[str]) -> dict[str, Segment]:
        try:
            encode = self._tokenizer.encode_batch
            shares = _shares(texts, self._width)
            done = await asyncio.gather(*(self.in_thread(encode, share) for share in shares))
            segments: dict[str, Segment] = {}
            for share, ids in zip(shares, done, strict=True):
                segments |= self._remember(share, ids)
            return segments
        finally:
            for text in texts:
                self._encoding.pop(text, None)

    def _remember(self, texts: list[str], ids: list[list[int]]) -> dict[str, Segment]:
        self.counts.encoded += sum(map(len, ids))
        return {
            text: self._memo.add(text, array("I", some).tobytes())
            for text, some in zip(texts, ids, strict=True)
        }


def _shares(texts: list[str], width: int) -> list[list[str]]:
    """The texts in at most `width` lists of about equal length in characters, and none of little."""
    width = max(1, min(width, sum(map(len, texts)) // INLINE_CHARACTERS))
    shares: list[list[str]] = [[] for _ in range(width)]
    sizes = [0] * width
    for text in sorted(texts, key=len, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(text)
        sizes[least] += len(text)
    return [share for share in shares if share]


def _look_at_the_error(task: "asyncio.Task[dict[str, Segment]]") -> None:
    """Retrieve the error: all waiting requests may be gone, and asyncio would report it as never
    retrieved."""
    if not task.cancelled():
        task.exception()
