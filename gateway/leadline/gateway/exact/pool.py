"""One TokenService for all services that have the same tokenizer.

Tokenizers and their memos take a hundred megabytes and more, and ten services of one model are common. A
TokenService keeps prompts of different services apart by the namespace of their chains. It lives as long as a
service uses it; its threads end with it.
"""

import asyncio
from pathlib import Path
from weakref import WeakValueDictionary

from leadline.gateway.exact.fetch import BundleRefused
from leadline.gateway.exact.mode import Reason
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import LeadlineError, UnsupportedModel
from leadline.protocol.text.bundle import bundle_digest, encode_bundle, load_bundle

__all__ = ["TokenPool"]


class TokenPool:
    """Digest of a bundle → its TokenService. Loads in threads. Lives on one event loop."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, TokenService] = WeakValueDictionary()
        self._loading: dict[str, asyncio.Task[TokenService]] = {}

    def get(self, digest: str) -> TokenService | None:
        return self._known.get(digest)

    async def of_bundle(self, data: bytes) -> tuple[str, TokenService]:
        """(digest, service) of an encoded bundle. Raises BundleRefused."""
        digest = bundle_digest(data)
        known = self._known.get(digest)
        if known is not None:
            return digest, known
        task = self._loading.get(digest)
        if task is None:
            task = self._loading[digest] = asyncio.create_task(asyncio.to_thread(_of_bundle, data))
            task.add_done_callback(lambda _: self._loading.pop(digest, None))
        try:
            # Shielded: one service that goes must not take the work from the others.
            tokens = await asyncio.shield(task)
        except LeadlineError as error:
            raise BundleRefused(Reason.INVALID, str(error)) from error
        return digest, self._known.setdefault(digest, tokens)

    async def of_folder(self, folder: Path) -> tuple[str, TokenService]:
        """The same of a model folder. Raises LeadlineError, OSError, ValueError."""
        digest, tokens = await asyncio.to_thread(_of_folder, folder)
        return digest, self._known.setdefault(digest, tokens) if digest else tokens


def _of_bundle(data: bytes) -> TokenService:
    tokenizer, renderer = load_bundle(data)
    return _warmed(TokenService(tokenizer, renderer))


def _of_folder(folder: Path) -> tuple[str, TokenService]:
    tokens = _warmed(TokenService.load(folder))
    try:
        return bundle_digest(encode_bundle(tokens.tokenizer)), tokens
    except UnsupportedModel:
        return "", tokens


def _warmed(tokens: TokenService) -> TokenService:
    _ = tokens.tokenizer.pieces.longest  # computed over the whole vocabulary on first use: not in a request
    return tokens
