"""What leader and workers say to each other outside of steps, as msgpack over their socket.

    leader ──Setup──▶ worker ──Hello──▶ leader      (both join the group, load, agree on the pool) ──Loaded──▶

Setup is the leader's only message. A worker that fails sends `Failed` and leaves. In between, single bytes
(ring.py) go both ways; no message is that short.
"""

from __future__ import annotations

import msgspec

from leadline.engine.config import EngineConfig

__all__ = ["Failed", "FromWorker", "Hello", "Loaded", "Setup", "decode_from_worker", "decode_setup", "encode"]


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Everything a worker needs to build its part."""

    config: EngineConfig
    rank: int
    path: str
    """The model's folder."""
    model_id: str
    revision: str
    check: bool
    """Compare a checksum of the sampled tokens over all ranks after each step (it waits for each step)."""
    log_level: int


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Imports are done and the device is there: about to join the group."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Ready for plans."""

    num_blocks: int
    max_model_len: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last message of a worker that failed: a class name of `errors` (or another, if unforeseen), and its
    text."""

    kind: str
    message: str


FromWorker = Hello | Loaded | Failed

encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
