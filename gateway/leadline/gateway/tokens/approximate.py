"""Prefix matching without a tokenizer: hash chains over pieces of text in place of blocks of tokens.

For models without a tokenizer, and for engines that publish no cache events. The next turn of a conversation
begins with this turn's request, byte for byte, so equal pieces in front mean equal tokens in front. Hashes
made here mean nothing to an engine; the index learns them from the gateway's own routing. Use a
`ServiceIndex` of its own for them:

    index = ServiceIndex(speculative_ttl=600.0)
    index.routed(pod, prompt.chain, 0, now)                   # held=0 renews all guesses
    depth = index.match(prompt.chain, now)[pod] * block_size  # estimated tokens, as with exact chains

A piece is 4 bytes for each token of a block: a depth in pieces reads as a depth in blocks.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

import msgspec

from leadline.gateway.tokens.service import ChainIdentity, PromptTokens
from leadline.protocol.chain import DIGEST_SIZE, ChainNamespace, short
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.text.prompts import PromptRequest, tools_shown

__all__ = ["BYTES_PER_TOKEN", "ApproximateTokens"]

BYTES_PER_TOKEN = 4
"""English and code under today's vocabularies. For other scripts the estimate is off, never the match."""

_KIND = b"leadline-approximate-1"
_encode = msgspec.json.Encoder().encode


class ApproximateTokens:
    """The interface of TokenService over pieces of text. Keeps nothing, needs no files."""

    async def prompts(
        self, request: PromptRequest, identity: ChainIdentity, *, max_model_len: int = 0
    ) -> list[PromptTokens]:
        """As `pieces`, with the interface of TokenService. `max_model_len` is not needed here."""
        return self.pieces(request, identity)

    def pieces(self, request: PromptRequest, identity: ChainIdentity) -> list[PromptTokens]:
        """The prompts of a request, in order; `ids` is None and `num_tokens` an estimate."""
        namespace = identity.namespace(cache_salt=getattr(request, "cache_salt", None) or "")
        root = _root(namespace)
        resumed = len(getattr(request, "resume_token_ids", None) or ())
        return [
            PromptTokens(
                None,
                _chain(root, text, namespace.block_size * per_token),
                max(1, -(-len(text) // per_token)) + resumed,
            )
            for text, per_token in _texts(request)
        ]

    def close(self) -> None:
        """Nothing to end; TokenService has threads."""


@lru_cache(maxsize=1024)
def _root(namespace: ChainNamespace) -> bytes:
    return blake2b(_KIND + namespace.root(), digest_size=DIGEST_SIZE).digest()


def _chain(root: bytes, text: bytes, step: int) -> list[int]:
    shorts = []
    for start in range(0, len(text) - step + 1, step):
        root = blake2b(root + text[start : start + step], digest_size=DIGEST_SIZE).digest()
        shorts.append(short(root))
    return shorts


def _texts(request: PromptRequest) -> Iterator[tuple[bytes, int]]:
    """(bytes of a prompt, bytes a token) for each prompt. Longer conversations begin with shorter ones."""
    if isinstance(request, CompletionRequest):
        for prompt in request.prompts():
            if isinstance(prompt, str):
                yield prompt.encode("utf-8", "surrogatepass"), BYTES_PER_TOKEN
            else:
                yield b"".join(token.to_bytes(4, "little") for token in prompt), 4
        return
    messages = request.messages
    if messages is None:  # of a TokenizeRequest
        yield (request.prompt or "").encode("utf-8", "surrogatepass"), BYTES_PER_TOKEN  # type: ignore[union-attr]
        return
    tools = tools_shown(request.tools, getattr(request, "tool_choice", None))
    head = [_encode(request.chat_template_kwargs or None), _encode(tools)]
    yield b"\n".join([*head, *map(_encode, messages)]), BYTES_PER_TOKEN
