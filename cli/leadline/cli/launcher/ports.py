"""Ports that stay reserved while no process listens on them.

A server that is to come back under the same address needs its port kept free for it in the meantime. A socket
that is bound and does not listen does that: with SO_REUSEADDR on both, Linux lets a second socket bind and
listen beside it, does not hand the port to processes that ask for any free one, and refuses connections while
only ours is there.
"""

from __future__ import annotations

import socket
from types import TracebackType

from leadline.engine.errors import ConfigError

__all__ = ["ReservedPort"]


class ReservedPort:
    """`host`, `port`; a context manager that lets go of it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` 0: any free one. Raises ConfigError when it is taken or the host is not ours."""
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """host:port, of an IPv6 address [host]:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
