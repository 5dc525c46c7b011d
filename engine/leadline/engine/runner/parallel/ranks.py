"""The worker processes of one engine, as the leader sees them: start, watch, explain their death, stop.

A worker's standard input is a pipe whose other end only the leader holds: end of file tells it that the
leader is gone, however it died. The other way round, a thread a worker waits for its process to end. A death
is final for the engine: the ranks are no longer in step. Collectives that wait for the dead are aborted, and
the leader's next word is a typed error:

    worker dies ─▶ watch thread: note it, abort ─▶ main thread's collective fails or returns ─▶ `guard` raises
                                                   main thread stuck for 10 s              ─▶ the process ends

A worker that hangs is found by the clock (`supervise`) and killed, from where on it is one that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.runner.parallel.messages import Failed, Hello, Loaded, Setup, decode_from_worker, encode
from leadline.engine.runner.parallel.ring import ACK
from leadline.engine.wire import error_from_kind

__all__ = ["Ranks"]

logger = logging.getLogger("leadline.engine.runner")

_CAUSE_SECONDS = 2.0
"""How long a failed collective waits to learn which rank's death made it fail."""
_COLLECTIVE_FAILURES = ("RuntimeError", "DistBackendError", "DistNetworkError")
"""What a rank dies of when another one has: not what to report, if there is anything else."""
_STUCK_SECONDS = 10.0
_LEAVE_SECONDS = 3.0
"""Less than the time that the API process waits for the core to stop."""
_WORKER = "leadline.engine.runner.parallel.worker"


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    failed: Failed | None = None
    exit_code: int | None = None
    """None while it lives."""

    def receive(self) -> Hello | Loaded | None:
        """Its next message; None for an acknowledgement. Raises ConnectionError if there will be none."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError(f"rank {self.rank} has left")
        if data == ACK:
            return None
        message = decode_from_worker(data)
        if isinstance(message, Failed):
            self.failed = message
            raise ConnectionError(f"rank {self.rank} has failed")
        return message

    def last_words(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)
            while self.failed is None:
                self.receive()


class Ranks:
    """Ranks 1 to size - 1. `close` may be called at any time, and is called when the interpreter ends."""

    def __init__(self, size: int, meeting_fd: int, plans_fd: int) -> None:
        self.dead: LeadlineError | None = None
        """Why nothing works any more."""
        self.abort: Callable[[], None] = lambda: None
        """Called from a watch thread when a worker has died."""
        self._busy = False
        self._busy_since = 0.0
        self._hang: EngineDead | None = None
        self._changed = threading.Condition()
        self.workers: list[_Worker] = []
        self.close = weakref.finalize(self, _stop, self.workers)
        for rank in range(1, size):
            self.workers.append(_start(rank, meeting_fd, plans_fd))
        for worker in self.workers:
            threading.Thread(
                target=_watch, args=(weakref.ref(self), worker), daemon=True, name=f"rank-{worker.rank}-watch"
            ).start()

    def send_setup(self, setup: Callable[[int], Setup]) -> None:
        """Tell each worker what to build, and wait until all are about to join the group."""
        for worker in self.workers:
            worker.socket.send(encode(setup(worker.rank)))
        for worker in self.workers:
            worker.receive()

    def await_loaded(self) -> list[Loaded]:
        """Wait until all workers are ready for plans."""
        return [message for worker in self.workers if isinstance(message := worker.receive(), Loaded)]

    def await_ack(self, index: int) -> None:
        """Take one acknowledgement of worker `index` (rank index + 1) out of its socket."""
        self.workers[index].receive()

    def supervise(self, seconds: float) -> None:
        """From here on, a step that takes longer than `seconds` is the end of the engine."""
        threading.Thread(
            target=_supervise, args=(weakref.ref(self), seconds), daemon=True, name="rank-supervisor"
        ).start()

    # -- death -----------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise EngineDead if a rank has died."""
        if self.dead is not None:
            raise EngineDead(str(self.dead))
        if any(worker.exit_code is not None for worker in self.workers):
            raise self._die(ConnectionError(), building=False)

    @contextlib.contextmanager
    def guard(self, *, building: bool = False) -> Iterator[None]:
        """Around all that needs the other ranks: whatever fails inside is the end of the engine.

        Raises EngineDead; while building, whatever type the failing rank's error has.
        """
        self.check_alive()
        self._busy_since, self._busy = time.monotonic(), True
        try:
            yield
        except Exception as error:
            raise self._die(error, building=building) from error
        except BaseException:
            self.dead = EngineDead("interrupted in the middle of a step: the ranks are no longer in step")
            raise
        finally:
            self._busy = False
        # An aborted collective may return as if it had worked.
        self.check_alive()

    def _die(self, error: Exception, *, building: bool) -> LeadlineError:
        found = self._explain(error, building)
        self.dead = found
        return found

    def _explain(self, error: Exception, building: bool) -> LeadlineError:
        if building and isinstance(error, LeadlineError):
            return error
        if self._hang is not None:
            return self._hang
        if isinstance(error, LeadlineError):
            return EngineDead(str(error))
        with self._changed:
            self._changed.wait_for(lambda: self._culprit(certain=True) is not None, _CAUSE_SECONDS)
        worker = self._culprit(certain=False)
        if worker is None:
            return EngineDead(f"rank 0 failed: {type(error).__name__}: {error}")
        if worker.failed is None:
            return EngineDead(f"rank {worker.rank} {_how(worker.exit_code)}")
        message = f"rank {worker.rank}: {worker.failed.message}"
        if building:
            return error_from_kind(worker.failed.kind, message)
        return EngineDead(f"{message} ({worker.failed.kind})")

    def _culprit(self, *, certain: bool) -> _Worker | None:
        """Who died first. Not certain: a worker whose collective failed, maybe for another one's death."""
        gone = [worker for worker in self.workers if worker.exit_code is not None]
        for worker in gone:
            if worker.failed is None or worker.failed.kind not in _COLLECTIVE_FAILURES:
                return worker
        return gone[0] if gone and not certain else None

    def end_a_hang(self, seconds: float) -> None:
        """Kill the workers if the leader has waited for `seconds` in one step."""
        if not self._busy or time.monotonic() - self._busy_since < seconds:
            return
        stopped = [worker for worker in self.workers if _is_stopped(worker.process.pid)]
        names = " and ".join(f"rank {worker.rank}" for worker in stopped or self.workers)
        verb = "is stopped" if stopped else "or rank 0 hangs"
        self._hang = EngineDead(f"a step has not ended within {seconds:g} s: {names} {verb}")
        for worker in self.workers:
            worker.process.kill()

    def note_exit(self, worker: _Worker, code: int) -> None:
        """From a watch thread: `worker` is gone."""
        worker.last_words()
        with self._changed:
            worker.exit_code = code
            self._changed.notify_all()
        if not self.close.alive:
            return
        with contextlib.suppress(Exception):
            self.abort()
        with self._changed:
            while self._busy and self.close.alive:
                if not self._changed.wait_for(lambda: not self._busy, _STUCK_SECONDS) and self._busy:
                    logger.critical(
                        "rank %d %s and rank 0 is stuck in a step with it: leaving", worker.rank, _how(code)
                    )
                    os._exit(1)


def _start(rank: int, meeting_fd: int, plans_fd: int) -> _Worker:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fds = (theirs.fileno(), meeting_fd, plans_fd)
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(rank), *map(str, fds)], stdin=subprocess.PIPE, pass_fds=fds
        )
    return _Worker(rank, process, ours)


def _watch(ranks: weakref.ref[Ranks], worker: _Worker) -> None:
    code = worker.process.wait()
    if (owner := ranks()) is not None:
        owner.note_exit(worker, code)


def _supervise(ranks: weakref.ref[Ranks], seconds: float) -> None:
    while (owner := ranks()) is not None and owner.close.alive:
        owner.end_a_hang(seconds)
        del owner
        time.sleep(min(seconds / 4, 1.0))


def _is_stopped(pid: int) -> bool:
    """By a signal or a debugger, where the system can be asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _stop(workers: list[_Worker]) -> None:
    """Workers leave when their socket closes; those that do not are killed."""
    for worker in workers:
        # Not close: the watch thread may be reading. Wakes the worker, and a main thread that waits here.
        with contextlib.suppress(OSError):
            worker.socket.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        try:
            worker.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        worker.socket.close()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
