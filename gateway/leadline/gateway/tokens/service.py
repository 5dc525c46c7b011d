"""Token ids and prefix chain of every prompt of one model, without importing the engine.

Room: gateway/tokens. Renders and tokenizes with `leadline.protocol.text`, as the engine does, and remembers
parts of texts and beginnings of chains. Bookkeeping happens on the event loop; tokenizing more than a little
happens in threads (the library releases the GIL), once even if many requests ask for the same text at the
same time.
"""

import asyncio
import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import msgspec

from leadline.gateway.tokens.chain_memo import ChainMemo, root_of
from leadline.gateway.tokens.memo import Segment, SegmentMemo
from leadline.gateway.tokens.prompt_memo import PromptMemo
from leadline.gateway.tokens.segments import Segmenter, special_affixes
from leadline.gateway.tokens.words import WordMemo
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import PromptInput, PromptRequest, prompt_inputs
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ChainIdentity", "PromptTokens", "TokenCounts", "TokenService"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

_INLINE_CHARACTERS = 4096
"""New text up to this length is tokenized on the event loop: about a millisecond."""
_INLINE_CUT = 1 << 18
_INLINE_MESSAGES = 64
_IDS_PER_SEGMENT = 1024


class ChainIdentity(Protocol):
    """What pods report of their block hashes: a `LoadReport`, or the `prefix_chain` of a model card."""

    def namespace(self, *, cache_salt: str = "", adapter: str = "") -> ChainNamespace: ...


class PromptTokens(msgspec.Struct, frozen=True, eq=False):
    """One prompt as the engine will see it."""

    ids: "array[int] | None"
    """Token ids, uint32; None when not known (approximate mode, or a prompt that is far too long)."""
    chain: list[int]
    """The first 64 bits of each full block's hash."""
    num_tokens: int
    """Exact where `ids` are known, else an estimate."""
    segments: Sequence[Segment] = ()


@dataclass(slots=True)
class TokenCounts:
    """What the memo did so far, for metrics."""

    encoded: int = 0
    """Tokens that came out of the tokenizer."""
    reused: int = 0
    """Tokens that were remembered."""


class TokenService:
    """Prompts of one model. Lives on one event loop; `close` ends its threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: ChatRenderer,
        *,
        memo_bytes: int = 256 << 20,
        chain_memo_bytes: int = 64 << 20,
        prompt_memo_bytes: int = 32 << 20,
        threads: int | None = None,
    ) -> None:
        """`threads` that tokenize, None: one a core, at most four. A long prompt is spread over all of
        them."""
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.counts = TokenCounts()
        self._segmenter = Segmenter(tokenizer)
        self._affixes = special_affixes(tokenizer)
        self._memo = SegmentMemo(memo_bytes)
        self._chains = ChainMemo(chain_memo_bytes)
        self._prompts: PromptMemo[PromptTokens] = PromptMemo(renderer, prompt_memo_bytes)
        self._words = WordMemo(tokenizer) if self._segmenter.words else None
        self._namespace: tuple[ChainIdentity | None, ChainNamespace, bytes] = (None, ChainNamespace(""), b"")
        """The last one asked for without a salt, and its root."""
        self._longest = tokenizer.pieces.longest
        self._width = threads or min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._width, thread_name_prefix="tokenize")
        self._encoding: dict[str, asyncio.Task[dict[str, Segment]]] = {}
        """Texts being tokenized right now → the task that has them."""

    @classmethod
    def load(cls, folder: str | Path, **settings: int) -> "TokenService":
        """The service over a model folder's tokenizer; takes about a second and blocks.

        Raises ModelNotFound, UnsupportedModel: use `ApproximateTokens` then.
        """
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens), **settings)

    def close(self) -> None:
        """End the threads; what is being tokenized is finished first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    @property
    def memo_bytes(self) -> int:
        """Bytes that the memos take, estimated."""
        return self._memo.used_bytes + self._chains.used_bytes + self._prompts.used_bytes

    def at_once(self, request: PromptRequest, identity: ChainIdentity) -> PromptTokens | None:
        """The prompt of a short chat, on the spot: remembered, or rendered and tokenized here and now. None
        where that may take longer: ask `prompts`. Raises as `prompts` does."""
        if not isinstance(request, ChatCompletionRequest):
            return None
        namespace, root = self._namespace_of(identity, request.cache_salt or "")
        key = self._prompts.key(request, root)
        if key is None:
            return None
        prompt = self._prompts.get(key)
        if prompt is not None:
            self.counts.reused += prompt.num_tokens
            return prompt
        if len(key) > _INLINE_CHARACTERS:
            return None
        (rendered,) = prompt_inputs(request, self.renderer)
        segments = self._short(str(rendered.content))
        if segments is None:
            return None
        prompt = self._joined(segments, namespace)
        self._prompts.put(key, prompt, 8 * prompt.num_tokens + 40 * len(prompt.chain))
        return prompt

    async def prompts(
        self, request: PromptRequest, identity: ChainIdentity, *, max_model_len: int = 0
    ) -> list[PromptTokens]:
        """The prompts of a request, in order; one for a chat.

        A text that cannot fit `max_model_len` tokens (0: unknown) is not tokenized: engines will refuse it.
        Raises RequestError for what the template or the tokenizer cannot take, as the engine would.
        """
        if len(getattr(request, "messages", None) or ()) <= _INLINE_MESSAGES:
            inputs = prompt_inputs(request, self.renderer)
        else:
            inputs = await self._in_thread(prompt_inputs, request, self.renderer)
        namespace = identity.namespace(cache_salt=getattr(request, "cache_salt", None) or "")
        keys = [await self._keys(prompt, max_model_len) for prompt in inputs]
        known = await self._segments({key for some in keys if some for key in some if isinstance(key, str)})
        result = []
        for prompt, some in zip(inputs, keys, strict=True):
            if some is None:
                estimate = -(-len(prompt.content) // self._longest)
                result.append(PromptTokens(None, [], estimate))
                continue
            segments = [known[key] if isinstance(key, str) else self._memo.of_ids(key) for key in some]
            result.append(self._joined(segments, namespace))
        return result

    def chain(self, prompt: PromptTokens, identity: ChainIdentity, *, cache_salt: str = "") -> list[int]:
        """The chain of a prompt in another namespace (another revision, another block size)."""
        if prompt.ids is None:
            return []
        return self._chains.chain(identity.namespace(cache_salt=cache_salt), prompt.segments, prompt.ids)

    # -- inside ----------------------------------------------------------------------------------------------

    def _namespace_of(self, identity: ChainIdentity, salt: str) -> tuple[ChainNamespace, bytes]:
        """A report's namespace and its root: nearly always those of the request before."""
        last = self._namespace
        if last[0] is identity and not salt:
            return last[1], last[2]
        namespace = identity.namespace(cache_salt=salt)
        root = root_of(namespace)
        if not salt:
            self._namespace = (identity, namespace, root)
        return namespace, root

    def _joined(self, segments: Sequence[Segment], namespace: ChainNamespace) -> PromptTokens:
        ids = array("I")
        ids.frombytes(b"".join([segment.packed for segment in segments]))
        return PromptTokens(ids, self._chains.chain(namespace, segments, ids), len(ids), segments)

    def _short(self, text: str) -> list[Segment] | None:
        """The segments of a rendered text; None if much of it is new."""
        if len(text) > _INLINE_CUT:
            return None
        texts = self._segmenter.cut(text)
        found = [self._memo.get(part) for part in texts]
        missing = [part for part, segment in zip(texts, found, strict=True) if segment is None]
        if not missing:
            new: dict[str, Segment] = {}
        elif sum(map(len, missing)) <= 2 * _INLINE_CHARACTERS:
            new = self._encode_now(missing)
        else:
            return None
        segments = [segment or new[part] for part, segment in zip(texts, found, strict=True)]
        self.counts.reused += sum([segment.num_tokens for segment in found if segment is not None])
        return segments

    async def _keys(self, prompt: PromptInput, max_model_len: int) -> list[str | bytes] | None:
        """The prompt as segments: texts, and packed token ids. None: too long by far."""
        content = prompt.content
        resumed = _packed(prompt.resume_token_ids)
        if not isinstance(content, str):
            return [*_packed(content), *resumed]
        # A token covers at most `longest` bytes. (The engine refuses such a text by the same arithmetic.)
        if max_model_len and -(-len(content) // self._longest) >= max_model_len:
            return None
        if prompt.add_special_tokens and self._affixes is None:
            ids = await self._in_thread(self.tokenizer.encode, content, True)
            return [*_packed(ids), *resumed]
        cut = self._segmenter.cut
        texts = cut(content) if len(content) <= _INLINE_CUT else await self._in_thread(cut, content)
        if not prompt.add_special_tokens or self._affixes is None:
            return [*texts, *resumed]
        before, behind = self._affixes
        return [*_packed(before), *texts, *_packed(behind), *resumed]

    async def _segments(self, texts: set[str]) -> dict[str, Segment]:
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
        if sum(map(len, missing)) <= _INLINE_CHARACTERS:
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

    def _encode_now(self, texts: list[str]) -> dict[str, Segment]:
        if self._words is None:
            return self._remember(texts, self.tokenizer.encode_batch(texts))
        segments = {}
        for text in texts:
            packed, encoded = self._words.encode(text)
            self.counts.encoded += encoded
            self.counts.reused += len(packed) // 4 - encoded
            segments[text] = self._memo.add(text, packed)
        return segments

    async def _encode(self, texts: list[str]) -> dict[str, Segment]:
        try:
            encode = self.tokenizer.encode_batch
            shares = _shares(texts, self._width)
            done = await asyncio.gather(*(self._in_thread(encode, share) for share in shares))
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

    async def _in_thread(self, function: Callable[[*Args], T], *args: *Args) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _packed(ids: Sequence[int]) -> list[bytes]:
    """Token ids in segments of a fixed length, so that a longer list begins with the shorter one's."""
    data = array("I", ids).tobytes()
    step = 4 * _IDS_PER_SEGMENT
    return [data[start : start + step] for start in range(0, len(data), step)]


def _shares(texts: list[str], width: int) -> list[list[str]]:
    """The texts in at most `width` lists of about equal length in characters, and none of little."""
    width = max(1, min(width, sum(map(len, texts)) // _INLINE_CHARACTERS))
    shares: list[list[str]] = [[] for _ in range(width)]
    sizes = [0] * width
    for text in sorted(texts, key=len, reverse=True):
        least = sizes.index(min(sizes))
        shares[least].append(text)
        sizes[least] += len(text)
    return [share for share in shares if share]


def _look_at_the_error(task: "asyncio.Task[dict[str, Segment]]") -> None:
    """Everybody who waited may be gone; asyncio would call the error forgotten."""
    if not task.cancelled():
        task.exception()
