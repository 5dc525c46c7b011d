"""The process behind structured output: `python -m leadline.engine.grammars.host SOCKET FOLDER …`.

Compiling a grammar and computing its masks may take long, grow large, or crash. So each grammar has a process
of its own, forked from one that has the model's vocabulary ready:

    engine core ──a socket and the spec (a memory file)──▶ nursery ──fork──▶ host ◀──socket──▶ engine core

A host compiles its grammar once and serves all sequences that follow it (`Open`, `Advance`, `Close`), one
message at a time. The kernel bounds it: memory by RLIMIT_AS, time by a timer around each message. Both end
the process, which the core sees at the socket; no other grammar is affected. Hosts run at a lower priority
than the engine's steps, and slow ones at a much lower one. They leave when the core closes their socket, the
nursery when the core is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from leadline.engine.errors import RequestError
from leadline.engine.sampling_params import StructuredSpec

__all__ = [
    "HEADER",
    "Advance",
    "Born",
    "Bounds",
    "Close",
    "Failed",
    "FromHost",
    "Masked",
    "Open",
    "Refused",
    "ToHost",
    "decode_from_host",
    "encode",
    "lower_priority",
]


class Bounds(msgspec.Struct, frozen=True):
    """What one grammar may take."""

    compile_seconds: float = 5.0
    """CPU time for compiling it and trying it out."""
    step_seconds: float = 2.0
    """CPU time for one token: accepting it, and computing the mask of the next."""
    memory_bytes: int = 1 << 29
    """Beside the vocabulary."""


_WALL_FACTOR = 40
"""Seconds of waiting for a second of CPU time: on a machine without idle CPU a slow host gets a tenth of a
core."""
_NICE = 4
"""Of a host, beside the engine's steps: it gets 30 % of a core that both want."""
_SLOW_NICE = 10
"""Of a host that compiles for long or computes slow masks: 10 %."""
_SLOW_SECONDS = 0.02
"""CPU time for a mask after which a host is slow."""
HEADER = struct.Struct("<I")


class Open(msgspec.Struct, tag=True, frozen=True):
    """Follow the grammar from its start, behind tokens that exist already."""

    sequence: int
    tokens: list[int] = []


class Advance(msgspec.Struct, tag=True, frozen=True):
    sequence: int
    tokens: list[int]


class Close(msgspec.Struct, tag=True, frozen=True):
    sequence: int


class Masked(msgspec.Struct, tag=True, frozen=True):
    """int32 words, bit set = allowed."""

    sequence: int
    mask: bytes


class Born(msgspec.Struct, tag=True, frozen=True):
    """The first message of a host."""

    pid: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`Open` cannot be answered: the caller's mistake."""

    sequence: int
    message: str
    param: str | None = None
    code: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The matcher gave up in the middle."""

    sequence: int
    message: str


ToHost = Open | Advance | Close
FromHost = Born | Masked | Refused | Failed

encode = msgspec.msgpack.Encoder().encode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
_decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
_decode_spec = msgspec.msgpack.Decoder(StructuredSpec).decode


def main(argv: list[str]) -> None:
    """Be the nursery: load the vocabulary, then fork a host for each socket that comes."""
    from leadline.engine.frontend.structured import GrammarCompiler

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the core decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps hosts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(argv[0]))
    vocab_size, eos = int(argv[2]), [int(part) for part in argv[3].split(",") if part]
    bounds = msgspec.json.decode(argv[4], type=Bounds)
    compiler = GrammarCompiler.from_folder(argv[1], vocab_size=vocab_size, eos_token_ids=eos)
    with contextlib.suppress(RequestError):  # each host says so
        compiler.prepare()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _serve(compiler, bounds, *descriptors)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve(compiler: Any, bounds: Bounds, socket_fd: int, spec_fd: int) -> None:
    engine = os.getpriority(os.PRIO_PROCESS, 0)
    os.nice(_NICE)
    link = socket.socket(fileno=socket_fd)
    with os.fdopen(spec_fd, "rb") as file:
        spec = _decode_spec(file.read())
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + bounds.memory_bytes,) * 2)
    _answer(link, Born(os.getpid()))
    host = Host(compiler, spec, bounds)
    while (frame := _receive(link)) is not None:
        message, began = _decode_to_host(frame), time.thread_time()
        for answer in host.handle(message):
            _answer(link, answer)
        if isinstance(message, Advance) and time.thread_time() - began > _SLOW_SECONDS:
            lower_priority(os.getpid(), engine)


def lower_priority(host: int, engine: int) -> None:
    """Give the process `host` the priority of slow ones, below that of the engine (a nice value)."""
    with contextlib.suppress(OSError):  # it has just ended
        os.setpriority(os.PRIO_PROCESS, host, min(engine + _SLOW_NICE, 19))


def _answer(link: socket.socket, answer: FromHost) -> None:
    data = encode(answer)
    link.sendall(HEADER.pack(len(data)) + data)


class Host:
    """One grammar and the sequences that follow it."""

    def __init__(self, compiler: Any, spec: StructuredSpec, bounds: Bounds) -> None:
        self._bounds = bounds
        self._compiler = compiler
        self._spec = spec
        self._matchers: dict[int, Any] = {}
        self._mask = np.zeros(compiler.mask_words, dtype=np.int32)

    def handle(self, message: ToHost) -> Iterator[FromHost]:
        """Do what a message asks, within its bounds; at most one answer."""
        match message:
            case Open(sequence, tokens):
                with _bounded(self._bounds.compile_seconds):
                    try:
                        matcher = self._compiler.matcher(self._spec)
                    except RequestError as error:
                        yield Refused(sequence, error.message, error.param, error.code)
                        return
                    for token in tokens:
                        if not matcher.accept(token):
                            message = f"the resumed output does not follow the grammar at token {token}"
                            yield Refused(sequence, message, "resume_token_ids")
                            return
                    self._matchers[sequence] = matcher
                    yield self._masked(sequence)
            case Advance(sequence, tokens):
                if sequence in self._matchers:
                    with _bounded(self._bounds.step_seconds):
                        yield self._advance(sequence, tokens)
            case Close(sequence):
                self._matchers.pop(sequence, None)

    def _advance(self, sequence: int, tokens: list[int]) -> FromHost:
        matcher = self._matchers[sequence]
        for token in tokens:
            if not matcher.accept(token):
                del self._matchers[sequence]
                return Failed(sequence, matcher.error or f"token {token} does not follow")
        return self._masked(sequence)

    def _masked(self, sequence: int) -> FromHost:
        matcher = self._matchers[sequence]
        matcher.mask(self._mask)
        if matcher.error is None and self._mask.any():
            return Masked(sequence, self._mask.tobytes())
        del self._matchers[sequence]
        return Failed(sequence, matcher.error or "no token may follow")


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """End the process where the block takes longer: the signals' default action, which needs no Python."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_FACTOR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _receive(link: socket.socket) -> bytes | None:
    header = _exactly(link, HEADER.size)
    return None if header is None else _exactly(link, HEADER.unpack(header)[0])


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        data = link.recv(count - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
