"""The keys of clients: tenant, models and limits of each.

Owns the keys in force. key_file.py describes the file and how keys are hashed; limits are enforced in
limits.py, priorities in admission/.

Comparison. The dictionary is searched by digest, not by key. Timing could only reveal something about the
digest of a guess, which the guesser knows and cannot steer towards a stored one. The entry found is compared
by `hmac.compare_digest` all the same.

Reload. `stat` checks the file every second: Kubernetes swaps a symlink above it, so events on the file itself
would be missed. A file that is broken or missing leaves the old keys in force, with one log line. No message
contains a key or a hash.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from leadline.gateway.access.key_file import MAX_KEY, Key, hash_key, key_entry, new_key, read_keys
from leadline.gateway.access.principal import ANONYMOUS, Principal
from leadline.gateway.errors import ConfigError, InvalidKey

__all__ = ["ANONYMOUS", "KeyRing", "Principal", "hash_key", "key_entry", "new_key"]

log = logging.getLogger(__name__)


class KeyRing:
    """The keys in force. Without a file every caller is ANONYMOUS (or the principal given)."""

    def __init__(self, path: str | Path | None = None, *, anonymous: Principal = ANONYMOUS) -> None:
        """Reads the file; raises ConfigError when it cannot be read or is wrong."""
        self._path = Path(path) if path else None
        self._anonymous = anonymous
        self._keys: dict[bytes, Key] = {}
        """By SHA-256."""
        self._seen: tuple[int, ...] | None = None
        self.reloads = 0
        """Times that a changed file was taken over."""
        self.failed_reloads = 0
        if self._path is not None:
            self._seen = _identity(self._path)
            self._keys = read_keys(self._path)

    def __repr__(self) -> str:
        return f"KeyRing({str(self._path)!r}, {len(self)} keys)"

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller with this Authorization header (`Bearer KEY`). Raises InvalidKey (401,
        invalid_api_key)."""
        if self._path is None:
            return self._anonymous
        digest = hashlib.sha256(_bearer(authorization)).digest()
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise _refusal("this key is not known here")
        if time.time() >= key.expires:
            raise _refusal("this key has expired")
        return key.principal

    def poll(self) -> bool:
        """Read the file again if it has changed. Returns whether new keys are in force. Never raises: a file
        that is broken or gone leaves the old keys in force, and is logged once."""
        if self._path is None:
            return False
        seen = _identity(self._path)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            self.failed_reloads += 1
            log.error("keys: keeping the old ones: %s", error)
            return False
        self._keys = keys
        self.reloads += 1
        log.info("keys: %d in force from %s", len(self), self._path)
        return True

    async def watch(self, every: float = 1.0, changed: Callable[[], None] | None = None) -> None:
        """Poll without end; a task for the event loop."""
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
