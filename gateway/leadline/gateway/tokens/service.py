"""Token ids and prefix chain of every prompt of one model, without importing the engine.

Renders and tokenizes with `leadline.protocol.text`, as the engine does, and remembers
short prompts, parts of texts (encoder.py, which has the threads too) and beginnings of chains.
"""

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from leadline.gateway.tokens.encoder import INLINE_CHARACTERS, SegmentEncoder
from leadline.gateway.tokens.memo import ChainMemo, PromptMemo, Segment, root_of
from leadline.gateway.tokens.segments import Segmenter, special_affixes
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import (
    PromptInput,
    PromptRequest,
    cut,
    prompt_inputs,
    prompt_token_ids,
    token_strs,
    tokens_kept,
)
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ChainIdentity", "PromptTokens", "TokenService"]

_INLINE_CUT = 1 << 18
_INLINE_MESSAGES = 64
_INLINE_IDS = 4096
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
        self._segmenter = Segmenter(tokenizer)
        self._affixes = special_affixes(tokenizer)
        width = threads or min(4, os.cpu_count() or 1)
        self._encoder = SegmentEncoder(tokenizer, memo_bytes, width, words=self._segmenter.words)
        self.counts = self._encoder.counts
        self._chains = ChainMemo(chain_memo_bytes)
        self._prompts: PromptMemo[PromptTokens] = PromptMemo(renderer, prompt_memo_bytes)
        self._namespace: tuple[ChainIdentity | None, ChainNamespace, bytes] = (None, ChainNamespace(""), b"")
        """The last one asked for without a salt, and its root."""
        self._longest = tokenizer.pieces.longest

    @classmethod
    def load(cls, folder: str | Path, **settings: int) -> "TokenService":
        """The service over a model folder's tokenizer; takes about a second and blocks.

        Raises ModelNotFound, UnsupportedModel: use `ApproximateTokens` then.
        """
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens), **settings)

    def close(self) -> None:
        """End the threads; what is being tokenized is finished first."""
        self._encoder.close()

    @property
    def memo_bytes(self) -> int:
        """Bytes that the memos take, estimated."""
        return self._encoder.used_bytes + self._chains.used_bytes + self._prompts.used_bytes

    def at_once(self, request: PromptRequest, identity: ChainIdentity) -> PromptTokens | None:
        """The prompt of a short chat, on the spot: remembered, or rendered and tokenized here and now. None
        where that may take longer: ask `prompts`. Raises as `prompts` does."""
        if not isinstance(request, ChatCompletionRequest):
            return None
        if request.truncate_prompt_tokens is not None or request.add_special_tokens:
            return None
        namespace, root = self._namespace_of(identity, request.cache_salt or "")
        key = self._prompts.key(request, root)
        if key is None:
            return None
        prompt = self._prompts.get(key)
        if prompt is not None:
            self.counts.reused += prompt.num_tokens
            return prompt
        if len(key) > INLINE_CHARACTERS:
            return None
        (rendered,) = prompt_inputs(request, self.renderer, self.tokenizer)
        text = str(rendered.content)
        if len(text) > _INLINE_CUT:
            return None
        segments = self._encoder.at_once(self._segmenter.cut(text))
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
        if (
            len(getattr(request, "messages", None) or ()) <= _INLINE_MESSAGES
            and getattr(request, "suffix", None) is None
        ):
            inputs = prompt_inputs(request, self.renderer, self.tokenizer)
        else:
            inputs = await self._encoder.in_thread(prompt_inputs, request, self.renderer, self.tokenizer)
        namespace = identity.namespace(cache_salt=getattr(request, "cache_salt", None) or "")
        kept = tokens_kept(request, max_model_len)
        keys: list[list[str | bytes] | None] = []
        for prompt in inputs:
            if kept is None:
                keys.append(await self._keys(prompt, max_model_len))
            else:
                keys.append(await self._some_tokens(request, prompt, kept))
        known = await self._encoder.segments(
            {key for some in keys if some for key in some if isinstance(key, str)}
        )
        result = []
        for prompt, some in zip(inputs, keys, strict=True):
            if some is None:
                estimate = -(-len(prompt.content) // self._longest)
                result.append(PromptTokens(None, [], estimate))
                continue
            segments = [known[key] if isinstance(key, str) else self._encoder.of_ids(key) for key in some]
            result.append(self._joined(segments, namespace))
        return result

    async def entries(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each token, as `/tokenize` shows them."""
        if len(ids) <= _INLINE_IDS:
            return token_strs(ids, self.tokenizer)
        return await self._encoder.in_thread(token_strs, ids, self.tokenizer)

    async def text(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        if len(ids) <= _INLINE_IDS:
            return self.tokenizer.decode(ids)
        return await self._encoder.in_thread(self.tokenizer.decode, ids)

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
            ids = await self._encoder.in_thread(self.tokenizer.encode, content, True)
            return [*_packed(ids), *resumed]
        cut = self._segmenter.cut
        texts = cut(content) if len(content) <= _INLINE_CUT else await self._encoder.in_thread(cut, content)
        if not prompt.add_special_tokens or self._affixes is None:
            return [*texts, *resumed]
        before, behind = self._affixes
        return [*_packed(before), *texts, *_packed(behind), *resumed]

    async def _some_tokens(
        self, request: PromptRequest, prompt: PromptInput, count: int
    ) -> list[str | bytes]:
        """The `count` tokens of a prompt that are used, and what follows them, as segments."""
        whole = replace(prompt, resume_token_ids=())
        ids = await self._encoder.in_thread(prompt_token_ids, whole, self.tokenizer)
        return [*_packed(cut(request, ids, count)), *_packed(prompt.resume_token_ids)]


def _packed(ids: Sequence[int]) -> list[bytes]:
    """Token ids in segments of a fixed length, so that a longer list begins with the shorter one's."""
    data = array("I", ids).tobytes()
    step = 4 * _IDS_PER_SEGMENT
    return [data[start : start + step] for start in range(0, len(data), step)]
