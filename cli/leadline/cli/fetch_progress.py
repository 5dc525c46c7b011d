"""Progress of `leadline model-path`: lines on standard error, and HTTP for the operator that watches a pod
start.

The HTTP server answers like an engine that starts (engine/README.md, "Progress while the server starts"), on
the port that the engine will have, so the operator asks both in the same way:

    GET /health  200 {"status": "starting", "progress": {…}}
    GET else     503 {"error": {…}, "progress": {…}}
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TextIO

import msgspec
from msgspec import UNSET, UnsetType

from leadline.engine.system.progress import LinePace
from leadline.protocol.errors import ErrorObject
from leadline.protocol.listening import bound_socket
from leadline.protocol.openai.service import NotReadyResponse, StartProgress, StatusResponse

__all__ = ["FetchProgress"]


class FetchProgress:
    """A `ReportStage` (leadline.engine.system.progress). As a context manager it serves HTTP on `port`."""

    def __init__(self, model: str, port: int | None = None, out: TextIO = sys.stderr) -> None:
        """`port` None: no HTTP; 0: a free one, which `port` then names. Raises OSError if it is taken."""
        self._model, self._out = model, out
        self._told: StartProgress | None = None
        self._pace = LinePace()
        self._server = None if port is None else _server(port, self)
        self.port = None if self._server is None else int(self._server.server_address[1])

    def __enter__(self) -> FetchProgress:
        if self._server is not None:
            # A client must not keep the process alive.
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __call__(self, stage: str, fraction: float | None, detail: str) -> None:
        share = None if fraction is None else round(fraction, 4)
        self._told = StartProgress(phase=stage, fraction=share, detail=detail)
        if self._pace.due(stage, fraction):
            percent = "" if fraction is None else f" ({int(fraction * 100)} %)"
            line = f"leadline: {self._model}: {stage}: {detail}{percent}{self._pace.times(fraction)}"
            print(line, file=self._out, flush=True)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        progress: StartProgress | UnsetType = UNSET if self._told is None else self._told
        if path == "/health":
            return 200, msgspec.json.encode(StatusResponse(status="starting", progress=progress))
        message = f"not ready: {self._model} is being fetched"
        error = ErrorObject(message=message, type="server_error", code="not_ready")
        return 503, msgspec.json.encode(NotReadyResponse(error=error, progress=progress))


def _server(port: int, progress: FetchProgress) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # a peer that connects and says nothing holds a thread no longer

        def do_GET(self) -> None:
            status, body = progress.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("", port), Handler, bind_and_activate=False)
    server.socket.close()  # made for IPv4 alone
    server.socket = bound_socket("::", port)
    server.server_address = server.socket.getsockname()
    server.server_activate()
    return server
