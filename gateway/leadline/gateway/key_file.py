"""The key file: what stands in it, and making an entry for it.

Room: gateway. A file, YAML or JSON, usually a mounted Secret:

    keys:
      - name: alice-laptop
        hash: sha256:7b0c…                  made by `leadline gateway hash-key`
        tenant: team-a                      shares are by tenant; the name when left out
        models: [Qwen/Qwen3-8B, "small-*"]  all when left out; a last * stands for anything
        class: interactive                  or batch, for its requests in the gateway's queue and in pods
        requests_per_minute: 600
        tokens_per_minute: 200000
        expires: 2027-01-31T00:00:00Z

Hashing at rest. A key made by `new_key` has 256 random bits. What slow hashes and salts protect, guessable
passwords and equal passwords of two users, does not exist here: nobody can search 2^256 keys, at any speed
of hashing. So SHA-256 is right for them, lookup is one hash and one dictionary access, and a wrong key costs
us no more than a right one (a slow hash there would be a lever for denial of service). For keys that people
choose there is `scrypt:`: each gets a salt and 16 MiB of work, done once a key in a thread; keys that were
right are remembered by their SHA-256, wrong ones in a small cache, and only a few checks run at a time.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from leadline.gateway.documents import Strict, convert, read_document
from leadline.gateway.errors import ConfigError
from leadline.gateway.principal import Principal

__all__ = ["MAX_KEY", "Key", "Ring", "hash_key", "key_entry", "new_key", "read_keys", "search"]

_SCRYPT: dict[str, Any] = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}
MAX_KEY = 4096
"""Characters."""


class _Entry(Strict):
    """One key in the file."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    hash: Annotated[str, Meta(pattern=r"^(sha256:[0-9a-f]{64}|scrypt:[0-9a-f]{32}:[0-9a-f]{64})$")]
    tenant: str = ""
    models: list[str] | None = None
    priority_class: Annotated[str, Meta(min_length=1)] = msgspec.field(name="class", default="interactive")
    requests_per_minute: Annotated[int, Meta(ge=0)] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0)] = 0
    expires: datetime | None = None


@dataclass(slots=True, frozen=True)
class Key:
    """One key in force."""

    principal: Principal
    digest: bytes
    salt: bytes
    """Empty: the digest is a SHA-256."""
    expires: float
    """Seconds since the Unix epoch."""


@dataclass(slots=True, frozen=True)
class Ring:
    """One version of the file."""

    fast: dict[bytes, Key]
    """By SHA-256."""
    slow: tuple[Key, ...]
    """Hashed by scrypt."""


def new_key() -> str:
    """A key of 256 random bits."""
    return "sk-ll-" + secrets.token_urlsafe(32)


def hash_key(key: str, *, slow: bool = False) -> str:
    """What stands for the key in the file. `slow`: by scrypt, for a key that a person has chosen. Raises
    ConfigError for a key that no client could send."""
    data = key.encode()
    if (
        not data
        or data != data.strip()
        or len(data) > MAX_KEY
        or any(byte <= 32 or byte > 126 for byte in data)
    ):
        raise ConfigError("a key must be printable ASCII without spaces, and not empty")
    if not slow:
        return "sha256:" + hashlib.sha256(data).hexdigest()
    salt = secrets.token_bytes(16)
    return f"scrypt:{salt.hex()}:{hashlib.scrypt(data, salt=salt, **_SCRYPT).hex()}"


def key_entry(
    name: str, key: str | None = None, *, slow: bool | None = None, **fields: object
) -> tuple[str, str]:
    """(key, lines of YAML for the file's list) for a new or a given key.

    `slow`: by default only given keys are hashed by scrypt. `fields`: tenant, models, class, ….
    """
    made = key if key is not None else new_key()
    hashed = hash_key(made, slow=key is not None if slow is None else slow)
    entry = {"name": name, "hash": hashed, **fields}
    convert(entry, _Entry, "key")
    # JSON is YAML, and quotes whatever needs it.
    return made, "  - " + msgspec.json.encode(entry).decode() + "\n"


def read_keys(path: Path) -> Ring:
    """The file's keys. Raises ConfigError naming file and field, and never quoting a hash."""
    document = read_document(path)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise ConfigError(f"{path}: must have one field, `keys`, a list")
    fast: dict[bytes, Key] = {}
    slow = []
    names: set[str] = set()
    for position, value in enumerate(entries):
        entry = convert(value, _Entry, f"{path}: keys[{position}]")
        if entry.name in names:
            raise ConfigError(f"{path}: keys[{position}].name: {entry.name!r} is there twice")
        names.add(entry.name)
        kind, *parts = entry.hash.split(":")
        digest = bytes.fromhex(parts[-1])
        expires = entry.expires
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=UTC)
        key = Key(
            Principal(
                tenant=entry.tenant or entry.name,
                name=entry.name,
                allowed_models=None if entry.models is None else frozenset(entry.models),
                priority_class=entry.priority_class,
                requests_per_minute=entry.requests_per_minute,
                tokens_per_minute=entry.tokens_per_minute,
            ),
            digest,
            bytes.fromhex(parts[0]) if kind == "scrypt" else b"",
            float("inf") if expires is None else expires.timestamp(),
        )
        if key.salt:
            slow.append(key)
        elif digest in fast:
            raise ConfigError(f"{path}: keys[{position}].hash: the same key has an entry already")
        else:
            fast[digest] = key
    return Ring(fast, tuple(slow))


def search(keys: tuple[Key, ...], key: bytes) -> Key | None:
    """Tries all, whether or not one fits, so that the time tells nothing of which."""
    found = None
    for entry in keys:
        digest = hashlib.scrypt(key, salt=entry.salt, **_SCRYPT)
        if hmac.compare_digest(digest, entry.digest):
            found = entry
    return found
