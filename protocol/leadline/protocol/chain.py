"""The prefix chain: names for prefixes of token sequences, the same in every process of a deployment.

Tokens are cut into blocks of `block_size`; the hash of a full block stands for everything up to its end:

    tokens   | t0 … t63 | t64 … t127 | t128 … t150     (the last, partial block has no hash)
                  │           │
    root ─────►  h_1 ──────► h_2
                             h_i = BLAKE2b-128(h_{i-1} ‖ tokens of block i, little-endian uint32)

`root` is h_0 = BLAKE2b-128(namespace). The namespace holds the format version and all that makes KV of
equal tokens differ (model, revision, adapter, tenant salt, block size): equal hashes mean interchangeable
blocks.

The engine keys its prefix cache by the full 16 bytes; events and the gateway use `short` of them. A
change of what is hashed must raise `FORMAT_VERSION`: old and new pods then never share a block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

__all__ = [
    "DIGEST_SIZE",
    "FORMAT_VERSION",
    "ChainNamespace",
    "InvalidTokenId",
    "TokenArray",
    "TokenIds",
    "chain",
    "chain_after",
    "extend",
    "short",
]

FORMAT_VERSION = "leadline-chain-1"
DIGEST_SIZE = 16
"""Bytes of a full hash."""

_SWAP = sys.byteorder == "big"
assert array("I").itemsize == 4, "array('I') is not 32 bits wide here; the chain needs uint32"


class TokenArray(Protocol):
    """A one-dimensional array of integers, as numpy has them (this package does not import numpy)."""

    def tolist(self) -> list[int]: ...


TokenIds = Sequence[int] | TokenArray


class InvalidTokenId(ValueError):
    """A token id that is no integer in [0, 2**32)."""


@dataclass(frozen=True, slots=True)
class ChainNamespace:
    """What blocks must have in common, beside their tokens, to be interchangeable."""

    model: str
    revision: str = ""
    adapter: str = ""
    cache_salt: str = ""
    """Separates tenants that must not learn from timing what others asked."""
    block_size: int = 64
    """Tokens a block."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")

    def root(self) -> bytes:
        """h_0: the 16-byte hash that every chain of this namespace starts from.

        Each field goes in as its UTF-8 length (little-endian uint32) and then its bytes, so that no two
        different namespaces concatenate to the same input.
        """
        digest = blake2b(digest_size=DIGEST_SIZE)
        for field in (
            FORMAT_VERSION,
            self.model,
            self.revision,
            self.adapter,
            self.cache_salt,
            str(self.block_size),
        ):
            # surrogatepass: a lone surrogate out of a JSON string is an odd salt, not a reason to fail.
            data = field.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(4, "little"))
            digest.update(data)
        return digest.digest()


def extend(parent: bytes, tokens: TokenIds) -> bytes:
    """The 16-byte hash of one full block that follows `parent` (a root or another block's hash).

    `tokens` must be one whole block of the namespace that `parent` came from; its size is not known here.
    Raises InvalidTokenId for an id outside uint32 and ValueError for a parent that is not 16 bytes.
    """
    if len(parent) != DIGEST_SIZE:
        raise ValueError(f"a parent hash has {DIGEST_SIZE} bytes, not {len(parent)}")
    return blake2b(parent + _little_endian(tokens), digest_size=DIGEST_SIZE).digest()


def chain(namespace: ChainNamespace, token_ids: TokenIds) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order: `len(token_ids) // block_size` times 16 bytes.

    `token_ids` may be a list, a tuple, an `array`, or a one-dimensional numpy array of integers (uint32 is
    fastest: it is not copied element by element). Raises InvalidTokenId for an id outside uint32.
    """
    return chain_after(namespace.root(), token_ids, namespace.block_size)


def chain_after(parent: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` that follow `parent`: the root, or the block before's hash.

    `block_size` must be the one of the namespace that `parent` came from. Else as `chain`.
    """
    data = _little_endian(token_ids)
    step = 4 * block_size
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        parent = blake2b(parent + data[start : start + step], digest_size=DIGEST_SIZE).digest()
        hashes.append(parent)
    return hashes


def short(h: bytes) -> int:
    """The first 64 bits of a hash as a big-endian unsigned integer: its first 16 hex digits as a number."""
    return int.from_bytes(h[:8], "big")


def _little_endian(tokens: TokenIds) -> bytes:
    """`tokens` as consecutive little-endian uint32."""
    # array('I', some_bytes) would read four bytes as one token: never what a caller means.
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidTokenId(f"token ids must be integers, not {type(tokens).__name__}")
    values: Sequence[int]
    if isinstance(tokens, (list, tuple)):
        values = tokens
    else:
        view = _view(tokens)
        if view is not None and view.ndim != 1:
            raise InvalidTokenId(f"token ids must have one dimension, not {view.ndim}")
        if view is not None and not _SWAP and view.itemsize == 4 and view.format in ("I", "L"):
            return view.tobytes()
        values = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    try:
        packed = array("I", values)
    except (OverflowError, TypeError) as error:
        raise InvalidTokenId(_explain(values)) from error
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _view(tokens: object) -> memoryview | None:
    try:
        return memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return None


def _explain(values: Sequence[object]) -> str:
    for position, value in enumerate(values):
        if not hasattr(value, "__index__"):
            return f"token id at position {position} is {value!r}, not an integer"
        if not 0 <= value.__index__() < 2**32:
            return f"token id at position {position} is {value}, outside [0, 2**32)"
    return "token ids must be integers in [0, 2**32)"
