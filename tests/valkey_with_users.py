"""A real Valkey with the users of the chart's: the file that its container starts with, line by line."""

from __future__ import annotations

import socket
import string
import subprocess
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from leadline.cli.valkey import find_server

USERS = Path(__file__).parents[1] / "charts/leadline/files/valkey-users.conf"


class ValkeyWithUsers:
    """A context manager."""

    def __init__(
        self, folder: Path, gateway: str = "gateway-secret", operator: str = "operator-secret"
    ) -> None:
        self._folder = folder
        self.gateway_password, self.operator_password = gateway, operator
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.place = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def gateway_url(self) -> str:
        return self.url("gateway", self.gateway_password)

    @property
    def admin_url(self) -> str:
        return self.url("operator", self.operator_password)

    def url(self, user: str, password: str) -> str:
        return f"redis://{quote(user, safe='')}:{password}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Empty, and with its first users only, as after every restart."""
        words = {"GATEWAY_PASSWORD": self.gateway_password, "OPERATOR_PASSWORD": self.operator_password}
        lines = [
            string.Template(USERS.read_text()).substitute(words),
            f"port {self.port}",
            "bind 127.0.0.1",
            'save ""',
            "appendonly no",
            f"dir {self._folder}",
        ]
        with (self._folder / "valkey.log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(find_server()), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self._folder
            )
        assert self._process.stdin is not None
        with self._process.stdin as config:
            config.write("\n".join(lines).encode() + b"\n")
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                said = (self._folder / "valkey.log").read_text(errors="replace")
                assert self._process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> ValkeyWithUsers:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
