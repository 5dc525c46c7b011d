"""Cache events and snapshots: what an engine tells gateways about the KV blocks it holds.

An engine publishes batches of net changes on one stream per service, and rewrites a snapshot of everything it
holds every few seconds. Both carry the pod's epoch (pod UID and start time), so that a restarted pod never
inherits blocks it no longer has. Hashes are `chain.short` of block hashes.

    stream     … batch seq 41 │ batch seq 42 │ batch seq 43 …
    snapshot         true after seq 42: apply 43, 44, … on top; a gap in seq means "load the snapshot again"
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from leadline.protocol.wire import WireError, decode_msgpack

__all__ = [
    "MAX_BATCH_BYTES",
    "MAX_SNAPSHOT_BYTES",
    "CacheSnapshot",
    "EventBatch",
    "decode_batch",
    "decode_snapshot",
    "encode_batch",
    "encode_snapshot",
]

MAX_BATCH_BYTES = 4 << 20
"""About 450,000 hashes: more than one step can change."""
MAX_SNAPSHOT_BYTES = 64 << 20
"""About 8 million blocks, 500 million tokens at 64 a block."""

Hash64 = Annotated[int, Meta(ge=0)]  # 64 bits at most: msgpack has no wider integer
SequenceNumber = Annotated[int, Meta(ge=0)]
Epoch = Annotated[str, Meta(min_length=1, max_length=256)]


class EventBatch(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The net change since the last batch: first `cleared` (everything), then `removed`, then `stored`."""

    epoch: Epoch
    seq: SequenceNumber
    """Counts a pod's batches within an epoch by one, from 0."""
    stored: list[Hash64] = []
    removed: list[Hash64] = []
    cleared: bool = False


class CacheSnapshot(msgspec.Struct, kw_only=True, frozen=True):
    """All blocks a pod holds, true after its batch `seq` (that batch is included)."""

    epoch: Epoch
    seq: Annotated[int, Meta(ge=-1)]
    """-1: no batch has been published yet."""
    stream_id: str = ""
    """Position in the Redis stream at that time; a reader that starts there misses nothing."""
    packed: bytes = b""
    """Hashes as little-endian uint64, 8 bytes a block."""

    @staticmethod
    def pack(hashes: Iterable[int]) -> bytes:
        """`hashes` as the `packed` field wants them."""
        values = array("Q", hashes)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    def hashes(self) -> array[int]:
        """The 64-bit hashes, as array('Q'). Its length is the number of blocks."""
        values = array("Q")
        values.frombytes(self.packed)
        if sys.byteorder == "big":
            values.byteswap()
        return values


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(EventBatch)
_snapshots = msgspec.msgpack.Decoder(CacheSnapshot)


def encode_batch(batch: EventBatch) -> bytes:
    """`batch` as msgpack."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> EventBatch:
    """The batch in `data`; raises WireError for garbage and for more than MAX_BATCH_BYTES."""
    return decode_msgpack(_batches, data, MAX_BATCH_BYTES)


def encode_snapshot(snapshot: CacheSnapshot) -> bytes:
    """`snapshot` as msgpack."""
    return _encoder.encode(snapshot)


def decode_snapshot(data: bytes) -> CacheSnapshot:
    """The snapshot in `data`; raises WireError for garbage and for more than MAX_SNAPSHOT_BYTES."""
    snapshot = decode_msgpack(_snapshots, data, MAX_SNAPSHOT_BYTES)
    if len(snapshot.packed) % 8:
        raise WireError(f"a snapshot holds 8 bytes a block; {len(snapshot.packed)} is no multiple of 8")
    return snapshot
