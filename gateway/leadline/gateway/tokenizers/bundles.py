"""Fetches the tokenizer bundle of a pod, and its names where no heartbeat has them.

The answer is data that another process made. It is read up to a limit, compared with the digest in its entity
tag and with the digest in the pod's heartbeat, and only then parsed. No file is written, and no name in the
bundle is used as a file name.
"""

import asyncio
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from leadline.gateway.tokens.mode import Reason
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import LeadlineError, UnsupportedModel
from leadline.protocol.text.bundle import MAX_BUNDLE_BYTES, bundle_digest, encode_bundle, load_bundle

__all__ = ["PATH", "BundleRefused", "TokenPool", "fetch_bundle", "fetch_names_and_task"]


PATH = "/admin/tokenizer"
# A network policy that does not know a new pod yet drops packets: a connection that comes, comes at once.
_PATIENCE = aiohttp.ClientTimeout(total=30.0, sock_connect=2.0)
_NAMES_PATIENCE = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
_MAX_NAMES_BYTES = 1 << 20


class _Card(msgspec.Struct):
    id: str
    task: Any = "generate"


class _Cards(msgspec.Struct):
    """Of a model list no more than names and task: other engines' cards have other fields."""

    data: list[_Card]


_cards = msgspec.json.Decoder(_Cards)


class BundleRefused(Exception):
    """The pod offers no bundle, or none that can be used."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def fetch_bundle(
    session: aiohttp.ClientSession,
    address: str,
    *,
    headers: dict[str, str] | None = None,
    known: str = "",
    expected: str = "",
) -> bytes | None:
    """The bundle of the pod at `address` (host:port), or None if its digest is `known`. `expected`: the
    digest it must have; empty: any. Raises BundleRefused."""
    asked = {"Accept-Encoding": "identity", **(headers or {})}
    if known:
        asked["If-None-Match"] = f'"{known}"'
    try:
        async with session.get(
            f"http://{address}{PATH}",
            headers=asked,
            allow_redirects=False,
            timeout=_PATIENCE,
        ) as response:
            if response.status == 304 and known:
                return None
            _check_status(response.status, address)
            tag = response.headers.get("ETag", "")
            data = await _read(response, address)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BundleRefused(
            Reason.UNREACHABLE, f"{address} gave no answer: {str(error) or type(error).__name__}"
        ) from error
    digest = bundle_digest(data)
    if tag != f'"{digest}"':
        raise BundleRefused(Reason.INVALID, f"{address} gave {len(data)} bytes that do not match its digest")
    if expected and digest != expected:
        raise BundleRefused(
            Reason.INVALID, f"{address} gave the tokenizer {digest}, but reports {expected} with its load"
        )
    return data


async def fetch_names_and_task(
    session: aiohttp.ClientSession, address: str, *, headers: dict[str, str] | None = None
) -> tuple[tuple[str, ...], str]:
    """What the pod at `address` calls its model, and what the model is served for. No names when it cannot be
    asked."""
    nothing: tuple[tuple[str, ...], str] = (), "generate"
    try:
        async with session.get(
            f"http://{address}/v1/models",
            headers=headers,
            allow_redirects=False,
            timeout=_NAMES_PATIENCE,
        ) as response:
            if response.status != 200:
                return nothing
            data = await response.content.read(_MAX_NAMES_BYTES)
            while piece := await response.content.read(_MAX_NAMES_BYTES - len(data)):
                data += piece
        cards = _cards.decode(data).data
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return nothing
    tasks = [card.task for card in cards if card.task in ("embed", "rerank")]
    return tuple(card.id for card in cards), tasks[0] if tasks else "generate"


def _check_status(status: int, address: str) -> None:
    if status == 200:
        return
    reasons = {404: Reason.NOT_OFFERED, 405: Reason.NOT_OFFERED, 501: Reason.NOT_OFFERED}
    reasons |= {401: Reason.FORBIDDEN, 403: Reason.FORBIDDEN}
    raise BundleRefused(
        reasons.get(status, Reason.UNREACHABLE), f"{address} answered {PATH} with status {status}"
    )


async def _read(response: aiohttp.ClientResponse, address: str) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > MAX_BUNDLE_BYTES:
            raise BundleRefused(
                Reason.INVALID,
                f"{address} gave more than the {MAX_BUNDLE_BYTES} bytes that a bundle may have",
            )
    return bytes(data)


class TokenPool:
    """One TokenService for all services that have the same tokenizer.

    Tokenizers and their memos take a hundred megabytes and more, and ten services of one model are common. A
    TokenService keeps prompts of different services apart by the namespaces of their chains. It lives as long
    as a service uses it; its threads end with it.
    """

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
