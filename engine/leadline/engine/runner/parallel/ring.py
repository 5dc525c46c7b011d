"""Plans in shared memory: a ring of frames that the leader writes once and every worker reads.

    frame        | 0            | 1            | 2            | 3            |
                 | bytes | more | data         |
                 `- written by the leader, then one byte to each worker: "the next frame is there"
    acknowledged by one byte from each worker: "I have copied it". The leader takes these out only when
    the ring is full, so a step costs one small write a worker and no wait.

The memory is an unnamed file whose descriptor workers inherit. Sockets (SOCK_SEQPACKET, one pair a worker)
order memory accesses and put idle workers to sleep; none spins.

A frame holds any step that uses neither penalties nor masks and whose new sequences' block tables are not
enormous. What is longer goes in pieces through the same ring.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator

from leadline.engine.config import EngineConfig

__all__ = ["ACK", "FRAMES", "PlanReader", "PlanWriter", "frame_bytes", "unnamed_file"]

FRAMES = 4
"""More than the steps that may be in flight, so that the leader does not wait for a worker to wake up."""
ACK = b"\1"
_BELL = b"\1"
_HEADER = struct.Struct("<II")
_LARGEST_FRAME = 1 << 20


def frame_bytes(config: EngineConfig, max_model_len: int) -> int:
    """Size of a frame."""
    rows, blocks = config.max_concurrent_requests, -(-max_model_len // config.block_size)
    # A row: 16 bytes; a block appended: 12; a sequence that enters: seven small fields and its parameters.
    bound = 1024 + 4 * config.max_num_batched_tokens + rows * (16 + 12 + 256 + 4 * blocks)
    return min(-(-bound // 4096) * 4096, _LARGEST_FRAME)


def unnamed_file() -> int:
    """A descriptor of an empty file in memory that has no name and goes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("leadline", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class PlanWriter:
    """The leader's end. `await_ack(worker)` returns once that worker has acknowledged one more frame."""

    def __init__(
        self, fd: int, frame_size: int, sockets: list[socket.socket], await_ack: Callable[[int], None]
    ) -> None:
        os.ftruncate(fd, FRAMES * frame_size)
        self._memory = mmap.mmap(fd, FRAMES * frame_size)
        self._frame_size = frame_size
        self._sockets = sockets
        self._await_ack = await_ack
        self._written = 0
        self._acknowledged = [0] * len(sockets)
        self.largest = 0
        """Bytes of the longest plan so far."""

    def write(self, data: bytes) -> None:
        """Hand `data` to every worker. Raises OSError if one is gone."""
        self.largest = max(self.largest, len(data))
        room = self._frame_size - _HEADER.size
        for first in range(0, len(data), room):
            piece = data[first : first + room]
            self._wait_for_a_free_frame()
            at = self._written % FRAMES * self._frame_size
            _HEADER.pack_into(self._memory, at, len(piece), first + room < len(data))
            self._memory[at + _HEADER.size : at + _HEADER.size + len(piece)] = piece
            self._written += 1
            for peer in self._sockets:
                peer.send(_BELL)

    def _wait_for_a_free_frame(self) -> None:
        for worker, count in enumerate(self._acknowledged):
            while self._written - count >= FRAMES:
                self._await_ack(worker)
                count += 1
            self._acknowledged[worker] = count


class PlanReader:
    """A worker's end. To be made once the leader has made its own."""

    def __init__(self, fd: int, leader: socket.socket) -> None:
        self._memory = mmap.mmap(fd, 0)
        self._frame_size = len(self._memory) // FRAMES
        self._leader = leader
        self._read = 0

    def __iter__(self) -> Iterator[bytes | bytearray]:
        """Plans in order, until the leader closes its end."""
        data = bytearray()
        while self._leader.recv(1):
            at = self._read % FRAMES * self._frame_size
            length, more = _HEADER.unpack_from(self._memory, at)
            data += self._memory[at + _HEADER.size : at + _HEADER.size + length]
            self._read += 1
            self._leader.send(ACK)
            if not more:
                yield data
                data = bytearray()
