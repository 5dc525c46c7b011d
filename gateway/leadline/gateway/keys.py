"""Keys of clients: who may come in, as which tenant, to which models, how often.

Room: gateway. Owns the keys in force; key_file.py says what the file looks like and how keys are hashed,
limits are enforced in limits.py, priorities in admission/.

Comparison. The dictionary is searched by digest, not by key: what timing could tell is something about the
digest of a guess, which the guesser knows and cannot steer towards a stored one; the entry found is compared
by `hmac.compare_digest` all the same.

Reload. The file is looked at by `stat` every second: Kubernetes swaps a symlink above it, so events on the
file itself would be missed. A file that is broken or missing leaves the old ring in force, with one log line.
No key and no hash is ever part of a message.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from leadline.gateway.errors import ConfigError, InvalidKey
from leadline.gateway.key_file import MAX_KEY, Key, Ring, hash_key, key_entry, new_key, read_keys, search
from leadline.gateway.principal import ANONYMOUS, Principal

__all__ = ["ANONYMOUS", "KeyRing", "Principal", "hash_key", "key_entry", "new_key"]

log = logging.getLogger(__name__)

_REMEMBERED = 4096
_SLOW_CHECKS = 2

_ValueT = TypeVar("_ValueT")


class KeyRing:
    """The keys in force. Without a file everybody is ANONYMOUS (or the principal given)."""

    def __init__(self, path: str | Path | None = None, *, anonymous: Principal = ANONYMOUS) -> None:
        """Reads the file; raises ConfigError when it cannot be read or is wrong."""
        self._path = Path(path) if path else None
        self._anonymous = anonymous
        self._ring = Ring({}, ())
        self._seen: tuple[int, ...] | None = None
        self._right: OrderedDict[bytes, Key] = OrderedDict()
        """SHA-256 of keys that were checked by scrypt → their entry."""
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._slow_checks = asyncio.Semaphore(_SLOW_CHECKS)
        self.reloads = 0
        """Times that a changed file was taken over."""
        self.failed_reloads = 0
        if self._path is not None:
            self._seen = _identity(self._path)
            self._ring = read_keys(self._path)

    def __repr__(self) -> str:
        return f"KeyRing({str(self._path)!r}, {len(self)} keys)"

    def __len__(self) -> int:
        return len(self._ring.fast) + len(self._ring.slow)

    def authenticate(self, authorization: str | None) -> Principal:
        """Who sends this Authorization header (`Bearer KEY`). Raises InvalidKey (401, invalid_api_key).

        Never blocks. A key with a scrypt hash is known here only after `authenticate_slow` has seen it once:
        call that one unless `has_slow_keys` is false.
        """
        if self._path is None:
            return self._anonymous
        digest = hashlib.sha256(_bearer(authorization)).digest()
        key = self._ring.fast.get(digest) or self._right.get(digest)
        if key is None or (not key.salt and not hmac.compare_digest(key.digest, digest)):
            raise _refusal("this key is not known here")
        if time.time() >= key.expires:
            raise _refusal("this key has expired")
        return key.principal

    @property
    def has_slow_keys(self) -> bool:
        """Some key is hashed by scrypt."""
        return bool(self._ring.slow)

    async def authenticate_slow(self, authorization: str | None) -> Principal:
        """As `authenticate`, and checks keys hashed by scrypt, in a thread, when they come first."""
        try:
            return self.authenticate(authorization)
        except InvalidKey:
            ring = self._ring
            if not ring.slow:
                raise
            key = _bearer(authorization)
            digest = hashlib.sha256(key).digest()
            if digest in self._right:  # expired
                raise
            if digest in self._wrong:
                self._wrong.move_to_end(digest)
                raise
            async with self._slow_checks:
                found = await asyncio.to_thread(search, ring.slow, key)
            if self._ring is ring:
                if found is not None:
                    _remember(self._right, digest, found)
                else:
                    _remember(self._wrong, digest, None)
            if found is None:
                raise
            if time.time() >= found.expires:
                raise _refusal("this key has expired") from None
            return found.principal

    def poll(self) -> bool:
        """Read the file again if it has changed; whether a new ring is in force. Never raises: a file that is
        broken or gone leaves the old ring in force, and is logged once."""
        if self._path is None:
            return False
        seen = _identity(self._path)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            ring = read_keys(self._path)
        except ConfigError as error:
            self.failed_reloads += 1
            log.error("keys: keeping the old ones: %s", error)
            return False
        self._ring = ring
        self._right.clear()
        self._wrong.clear()
        self.reloads += 1
        log.info("keys: %d in force from %s", len(self), self._path)
        return True

    async def watch(self, every: float = 1.0, changed: Callable[[], None] | None = None) -> None:
        """Poll for ever; a task for the event loop."""
        while True:
            await asyncio.sleep(every)
            if self.poll() and changed is not None:
                changed()


# -- inside --------------------------------------------------------------------------------------------------


def _identity(path: Path) -> tuple[int, ...] | None:
    """Differs once the file is written or replaced, or a symlink on its way is swapped; None: not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _bearer(authorization: str | None) -> bytes:
    if not authorization:
        raise _refusal("a key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise _refusal("the Authorization header must be: Bearer KEY")
    if len(key) > MAX_KEY:
        raise _refusal("this key is not known here")
    return key.encode("utf-8", "surrogatepass")


def _refusal(message: str) -> InvalidKey:
    return InvalidKey(message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _remember(cache: "OrderedDict[bytes, _ValueT]", digest: bytes, value: "_ValueT") -> None:
    cache[digest] = value
    while len(cache) > _REMEMBERED:
        cache.popitem(last=False)
