"""The keys file: its format, and making an entry for it.

A file, YAML or JSON, usually a mounted Secret:

    keys:
      - name: alice-laptop
        hash: sha256:7b0c…                  made by `leadline gateway hash-key`
        tenant: team-a                      shares are by tenant; the name when left out
        models: [Qwen/Qwen3-8B, "small-*"]  all when left out; a last * stands for anything
        class: interactive                  or batch, for its requests in the gateway's queue and in pods
        requests_per_minute: 600
        tokens_per_minute: 200000
        expires: 2027-01-31T00:00:00Z

Hashing at rest. A key made by `new_key` has 256 random bits. Slow hashes and salts protect guessable
passwords and equal passwords of two users, and neither exists here: 2^256 keys cannot be searched at any
speed of hashing. So SHA-256 is right, a lookup is one hash and one dictionary access, and a wrong key costs
us no more than a right one (a slow hash would be a lever for denial of service).
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from leadline.gateway.access.principal import Principal
from leadline.gateway.config.documents import Strict, convert, read_document
from leadline.gateway.errors import ConfigError

__all__ = ["MAX_KEY", "Key", "hash_key", "key_entry", "new_key", "read_keys"]

MAX_KEY = 4096
"""Characters."""


class _Entry(Strict):
    """One key in the file."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    hash: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
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
    """SHA-256 of the key."""
    expires: float
    """Seconds since the Unix epoch."""


def new_key() -> str:
    """A key of 256 random bits."""
    return "sk-ll-" + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash of the key for the file. Raises ConfigError for a key that no client could send."""
    data = key.encode()
    if (
        not data
        or data != data.strip()
        or len(data) > MAX_KEY
        or any(byte <= 32 or byte > 126 for byte in data)
    ):
        raise ConfigError("a key must be printable ASCII without spaces, and not empty")
    return "sha256:" + hashlib.sha256(data).hexdigest()


def key_entry(name: str, key: str | None = None, **fields: object) -> tuple[str, str]:
    """Return a new or the given key, and lines of YAML for the file's list. `fields`: tenant, models, class,
    …."""
    made = key if key is not None else new_key()
    entry = {"name": name, "hash": hash_key(made), **fields}
    convert(entry, _Entry, "key")
    # JSON is YAML, and quotes whatever needs it.
    return made, "  - " + msgspec.json.encode(entry).decode() + "\n"


def read_keys(path: Path) -> dict[bytes, Key]:
    """Return the file's keys by SHA-256. Raises ConfigError naming file and field, and never quoting a
    hash."""
    document = read_document(path)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise ConfigError(f"{path}: must have one field, `keys`, a list")
    keys: dict[bytes, Key] = {}
    names: set[str] = set()
    for position, value in enumerate(entries):
        entry = convert(value, _Entry, f"{path}: keys[{position}]")
        if entry.name in names:
            raise ConfigError(f"{path}: keys[{position}].name: {entry.name!r} is there twice")
        names.add(entry.name)
        digest = bytes.fromhex(entry.hash.removeprefix("sha256:"))
        if digest in keys:
            raise ConfigError(f"{path}: keys[{position}].hash: the same key has an entry already")
        expires = entry.expires
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=UTC)
        keys[digest] = Key(
            Principal(
                tenant=entry.tenant or entry.name,
                name=entry.name,
                allowed_models=None if entry.models is None else frozenset(entry.models),
                priority_class=entry.priority_class,
                requests_per_minute=entry.requests_per_minute,
                tokens_per_minute=entry.tokens_per_minute,
            ),
            digest,
            float("inf") if expires is None else expires.timestamp(),
        )
    return keys
