"""The port, and uvicorn on it: the same for every API process of a server."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from leadline.engine.errors import ConfigError
from leadline.engine.server.process.edge import EngineEdge
from leadline.engine.server.settings import ServerSettings
from leadline.protocol.http.server_protocol import ServerProtocol
from leadline.protocol.listening import bound_socket, use_many_descriptors

__all__ = ["LAST_WORDS_SECONDS", "address_of", "http_server", "listen", "listen_first", "settle_garbage"]

_BACKLOG = 2048
LAST_WORDS_SECONDS = 3
"""Time that answers already decided (errors included) get to leave after the engine is gone."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a drain must keep answering, which uvicorn's own exit does not."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: FastAPI, settings: ServerSettings) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            EngineEdge(app, settings),
            http=ServerProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        )
    )


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind before anything slow happens: a port in use is reported at once, as a ConfigError."""
    use_many_descriptors()
    try:
        listener = bound_socket(host, port, shared=shared)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def listen_first(host: str, port: int, *, shared: bool) -> socket.socket:
    """The listener of the process that the user started. `shared`: others will `listen` beside it, which
    must not let a second server slip in: the port has to be free first."""
    if shared:
        with listen(host, port) as alone:
            port = alone.getsockname()[1]
    return listen(host, port, shared=shared)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def settle_garbage() -> None:
    """Once a process is ready: what is loaded stays, and thousands of live streams are not garbage, so look
    at them rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
