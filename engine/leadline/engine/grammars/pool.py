"""The engine core's side of structured output: which grammar lives in which process, and whose turn it is.

    open(request) ─▶ queue, fair between clients ─▶ a host that has the grammar, or a new one
    advance(request, tokens) ─▶ its host                                    (see host.py)
    poll() ◀─ a mask for the next token, or the reason why there is none

Only `poll` waits for hosts, and no longer than its argument says. Belongs to the core loop's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from leadline.engine.errors import RequestError, StructuredOutputFailed
from leadline.engine.grammars import host as wire
from leadline.engine.sampling_params import StructuredSpec
from leadline.engine.system.pulse import process_state

__all__ = ["GrammarHosts", "MaskOrError"]

MaskOrError = np.ndarray | RequestError

_MOST_HOSTS = 64
_MOST_IDLE = 16
_FRESH_SECONDS = 0.5
"""A compilation that takes longer lets others begin."""
_MOST_FRESH = 2
_MOST_COMPILING = 6
_QUICK_SECONDS = 0.005
"""A host whose answers take longer is not waited for."""
_LONG_TICKS = 10
"""CPU time of a compilation, in ticks of 10 ms, after which its host gets the priority of slow ones."""
_LOOK_SECONDS = 0.05
_MOST_IDLE_SECONDS = 30.0
"""A grammar that no request follows is kept this long: an agent's next turn asks for it again."""

_Key = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class _Sequence:
    request_id: str
    number: int
    spec: StructuredSpec
    client: str
    tokens: list[int]
    host: _Host | None = None
    asked: float = 0.0
    """When the mask that is awaited was asked for; 0: none is."""


@dataclass(slots=True, eq=False)
class _Host:
    key: _Key
    link: socket.socket
    born: float
    pid: int = 0
    """Known once it has said so, until it is gone."""
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    compiled: bool = False
    quick: bool = True
    lowered: bool = False
    """Its compilation is long: it has the priority of slow ones."""
    idle_since: float = 0.0
    """When its last sequence left; read only while it has none."""
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)


class GrammarHosts:
    """Masks of all structured sequences of one engine. The nursery starts with the first of them."""

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        bounds: wire.Bounds = wire.Bounds(),  # noqa: B008 (frozen)
    ) -> None:
        self._bounds = bounds
        self._command = [
            sys.executable,
            "-m",
            "leadline.engine.grammars.host",
            str(folder),
            str(vocab_size),
            ",".join(map(str, eos_token_ids)),
            msgspec.json.encode(bounds).decode(),
        ]
        self._words = (vocab_size + 31) // 32
        self._control: socket.socket | None = None
        self._hosts: OrderedDict[_Key, _Host] = OrderedDict()
        """By grammar, the one used last at the end."""
        self._by_descriptor: dict[int, _Host] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._queues: OrderedDict[str, deque[_Sequence]] = OrderedDict()
        """Sequences without a host, by client; the client that was served last stands last."""
        self._poller = select.poll()
        self._next = 0
        self._looked = 0.0
        """When the CPU time of compilations was read last."""
        self._ended: list[tuple[str, MaskOrError]] = []

    @property
    def num_queued(self) -> int:
        """Sequences whose grammar waits to be compiled."""
        return sum(map(len, self._queues.values()))

    def open(
        self, request_id: str, spec: StructuredSpec, tokens: Sequence[int] = (), *, client: str = ""
    ) -> None:
        """Follow `spec` for a request, behind `tokens` that it has already. `poll` brings the first mask."""
        self._next += 1
        sequence = _Sequence(request_id, self._next, spec, client, list(tokens))
        self._sequences[request_id] = sequence
        self._queues.setdefault(client, deque()).append(sequence)
        self._begin()

    def advance(self, request_id: str, tokens: list[int]) -> None:
        """Tokens of a request that `poll` has given a mask; it brings the next one."""
        sequence = self._sequences[request_id]
        assert sequence.host is not None
        sequence.asked = time.monotonic()
        self._send(sequence.host, wire.Advance(sequence.number, tokens))

    def close(self, request_id: str) -> None:
        """The request has ended. Nothing more comes of it."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.host is None:
            queue = self._queues.get(sequence.client)
            if queue is not None and sequence in queue:
                queue.remove(sequence)
            return
        self._leave(sequence)

    def poll(self, seconds: float = 0.0, *, quick: bool = False) -> list[tuple[str, MaskOrError]]:
        """(request, its mask or why there is none) of those that have come, after at most `seconds`. `quick`:
        wait only for those that usually come at once."""
        ends = time.monotonic() + seconds
        found: list[tuple[str, MaskOrError]] = []
        while True:
            self._begin()
            self._look_at_hosts()
            found += self._ended
            self._ended = []
            left = ends - time.monotonic()
            wait = left > 0 and (self._quick_ones_are_due() if quick else not found)
            for descriptor, _ in self._poller.poll(left * 1000 if wait else 0):
                if (host := self._by_descriptor.get(descriptor)) is not None:
                    found += self._read(host)
            if not wait:
                return found

    def end_idle(self, seconds: float = _MOST_IDLE_SECONDS) -> None:
        """End the hosts that no request has followed for `seconds`. They hold memory."""
        now = time.monotonic()
        for host in list(self._hosts.values()):
            if not host.sequences and now - host.idle_since >= seconds:
                self._drop(host)

    def stop(self) -> None:
        """End every process."""
        for host in list(self._by_descriptor.values()):
            self._drop(host)
        if self._control is not None:
            self._control.close()
            self._control = None

    # -- hosts -----------------------------------------------------------------------------------------------

    def _quick_ones_are_due(self) -> bool:
        now = time.monotonic()
        return any(
            sequence.asked and now - sequence.asked < _QUICK_SECONDS
            for host in self._hosts.values()
            if host.compiled and host.quick
            for sequence in host.sequences.values()
        )

    def _begin(self) -> None:
        """Give queued sequences a host, a client at a time, as far as bounds allow."""
        waiting = [client for client, queue in self._queues.items() if queue]
        for client in waiting:
            queue = self._queues[client]
            for sequence in list(queue):
                key = sequence.spec.kind, sequence.spec.value, sequence.spec.calls
                host = self._hosts.get(key)
                if host is not None:
                    self._hosts.move_to_end(key)
                    queue.remove(sequence)
                    self._join(host, sequence)
        for client in waiting:
            queue = self._queues[client]
            if queue and self._may_begin():
                sequence = queue.popleft()
                self._queues.move_to_end(client)
                if (host := self._fork(sequence)) is not None:
                    self._join(host, sequence)
        for client in waiting:
            if not self._queues[client]:
                del self._queues[client]

    def _may_begin(self) -> bool:
        now = time.monotonic()
        compiling = [now - host.born for host in self._hosts.values() if not host.compiled]
        fresh = sum(age < _FRESH_SECONDS for age in compiling)
        if fresh >= _MOST_FRESH or len(compiling) >= _MOST_COMPILING:
            return False
        if len(self._hosts) < _MOST_HOSTS:
            return True
        idle = next((host for host in self._hosts.values() if not host.sequences), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _look_at_hosts(self) -> None:
        """Give compilations that are long what the engine's steps leave of the CPU; end idle hosts."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.end_idle()
        for host in self._by_descriptor.values():
            if host.compiled or host.lowered or not host.pid:
                continue
            found = process_state(host.pid)
            if found is not None and found[1] >= _LONG_TICKS:
                host.lowered = True
                wire.lower_priority(host.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def _fork(self, sequence: _Sequence) -> _Host | None:
        spec = sequence.spec
        key = spec.kind, spec.value, spec.calls
        ours, theirs = socket.socketpair()
        with theirs, open(os.memfd_create("spec"), "w+b") as file:
            file.write(wire.encode(spec))
            file.flush()
            file.seek(0)
            for _ in range(2):  # a nursery that has died is replaced once
                try:
                    if self._control is None:
                        self._control = self._start()
                    socket.send_fds(self._control, [b"f"], [theirs.fileno(), file.fileno()])
                    break
                except OSError as error:
                    self._control = None
                    reason = str(error)
            else:
                ours.close()
                self._end(sequence, StructuredOutputFailed(f"structured output cannot be started: {reason}"))
                return None
        ours.setblocking(False)
        host = self._hosts[key] = _Host(key, ours, time.monotonic())
        self._by_descriptor[ours.fileno()] = host
        self._poller.register(ours, select.POLLIN)
        return host

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*self._command[:3], str(theirs.fileno()), *self._command[3:]]
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        weakref.finalize(ours, _reap, process)
        return ours

    def _join(self, host: _Host, sequence: _Sequence) -> None:
        sequence.host = host
        sequence.asked = time.monotonic()
        host.sequences[sequence.number] = sequence
        self._send(host, wire.Open(sequence.number, sequence.tokens))

    def _send(self, host: _Host, message: wire.ToHost) -> None:
        data = wire.encode(message)
        host.outgoing += wire.HEADER.pack(len(data)) + data
        self._flush(host)

    def _flush(self, host: _Host) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # a host that died is seen when read
            del host.outgoing[: host.link.send(host.outgoing)]
        self._poller.modify(host.link, select.POLLIN | (select.POLLOUT if host.outgoing else 0))

    def _read(self, host: _Host) -> list[tuple[str, MaskOrError]]:
        if host.outgoing:
            self._flush(host)
        try:
            data = host.link.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            host.pid = 0
            return self._died(host)
        host.incoming += data
        found = []
        while len(host.incoming) >= wire.HEADER.size:
            (size,) = wire.HEADER.unpack_from(host.incoming)
            end = wire.HEADER.size + size
            if len(host.incoming) < end:
                break
            answer = wire.decode_from_host(host.incoming[wire.HEADER.size : end])
            del host.incoming[:end]
            if isinstance(answer, wire.Born):
                host.pid = answer.pid
            elif (sequence := host.sequences.get(answer.sequence)) is not None:
                found.append((sequence.request_id, self._answer(host, sequence, answer)))
        return found

    def _answer(self, host: _Host, sequence: _Sequence, answer: wire.FromHost) -> MaskOrError:
        took, sequence.asked = time.monotonic() - sequence.asked, 0.0
        match answer:
            case wire.Masked(_, mask):
                if host.compiled:
                    host.quick = took < _QUICK_SECONDS
                host.compiled = True
                found = np.zeros(self._words, dtype=np.int32)
                words = np.frombuffer(mask, dtype=np.int32)[: self._words]
                found[: len(words)] = words
                return found
            case wire.Refused(_, message, param, code):
                self._forget(sequence)
                if param == "resume_token_ids":
                    self._leave(sequence)
                    return RequestError(message, param=param)
                self._retire(host)
                return RequestError(message, param=sequence.spec.param or param, code=code)
            case wire.Failed(_, message):
                self._forget(sequence)
                self._retire(host)  # its other sequences go on; new ones do not share a lexer that has failed
                return StructuredOutputFailed(_IN_THE_MIDDLE.format(message))
            case wire.Born():
                raise AssertionError("names no sequence")

    def _died(self, host: _Host) -> list[tuple[str, MaskOrError]]:
        """It ran into a bound, or crashed. All that follow its grammar end."""
        sequences = list(host.sequences.values())
        for sequence in sequences:
            self._sequences.pop(sequence.request_id, None)
        self._drop(host)
        bounds, megabytes = self._bounds, self._bounds.memory_bytes >> 20
        if not host.compiled:
            message = (
                f"compiling it takes more than {bounds.compile_seconds:g} s or {megabytes} MiB; simplify it"
            )
            return [(each.request_id, _rejected(each.spec, message)) for each in sequences]
        message = f"one token takes more than {bounds.step_seconds:g} s, or all more than {megabytes} MiB"
        error = StructuredOutputFailed(_IN_THE_MIDDLE.format(message))
        return [(each.request_id, error) for each in sequences]

    def _end(self, sequence: _Sequence, error: RequestError) -> None:
        self._sequences.pop(sequence.request_id, None)
        self._ended.append((sequence.request_id, error))

    def _forget(self, sequence: _Sequence) -> None:
        self._sequences.pop(sequence.request_id, None)
        assert sequence.host is not None
        sequence.host.sequences.pop(sequence.number, None)

    def _leave(self, sequence: _Sequence) -> None:
        host = sequence.host
        assert host is not None
        host.sequences.pop(sequence.number, None)
        host.idle_since = time.monotonic()
        if self._hosts.get(host.key) is not host or (not host.compiled and not host.sequences):
            # Retired, or its compilation has no reader.
            if not host.sequences:
                self._drop(host)
            return
        self._send(host, wire.Close(sequence.number))
        idle = [each for each in self._hosts.values() if not each.sequences]
        for each in idle[: max(0, len(idle) - _MOST_IDLE)]:
            self._drop(each)

    def _retire(self, host: _Host) -> None:
        if self._hosts.get(host.key) is host:
            del self._hosts[host.key]
        if not host.sequences:
            self._drop(host)

    def _drop(self, host: _Host) -> None:
        if self._hosts.get(host.key) is host:
            del self._hosts[host.key]
        if self._by_descriptor.pop(host.link.fileno(), None) is not None:
            self._poller.unregister(host.link)
            host.link.close()
        if host.pid and not host.compiled:
            # Its compilation would go on, without a reader.
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.pid, signal.SIGKILL)


_IN_THE_MIDDLE = "the grammar of the structured output failed in the middle of the answer: {}"


def _rejected(spec: StructuredSpec, complaint: str) -> RequestError:
    from leadline.engine.frontend.structured import rejected

    return rejected(spec, complaint)


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
