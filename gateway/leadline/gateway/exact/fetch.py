"""The tokenizer bundle of one pod, over HTTP.

What comes is data that another process made: it is read up to a limit, compared with the digest in its entity
tag and with the one that the pod's heartbeat told through Redis, and only then parsed (pool.py). No file is
written and no name in it is used as one.
"""

import aiohttp

from leadline.gateway.exact.mode import Reason
from leadline.protocol.text.bundle import MAX_BUNDLE_BYTES, bundle_digest

__all__ = ["PATH", "BundleRefused", "fetch_bundle"]

PATH = "/admin/tokenizer"
_SECONDS = 30.0


class BundleRefused(Exception):
    """There is no bundle to be had, or not one to be used."""

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
            timeout=aiohttp.ClientTimeout(total=_SECONDS),
        ) as response:
            if response.status == 304 and known:
                return None
            _check_status(response.status, address)
            tag = response.headers.get("ETag", "")
            data = await _read(response, address)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BundleRefused(
            Reason.UNREACHABLE, f"{address} gave no answer: {error or type(error).__name__}"
        ) from error
    digest = bundle_digest(data)
    if tag != f'"{digest}"':
        raise BundleRefused(Reason.INVALID, f"{address} gave {len(data)} bytes that do not match its digest")
    if expected and digest != expected:
        raise BundleRefused(
            Reason.INVALID, f"{address} gave the tokenizer {digest}, but reports {expected} with its load"
        )
    return data


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
