"""Sends the core's outputs to the API process that owns each request.

    Outputs of a step ──▶ by owner ──▶ SOCKET_DIR/out      API process 0, which started the core
                                   └─▶ SOCKET_DIR/out.N    API process N, attached later

Most cores talk to one API process: then nothing is sorted, and no owner is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import zmq

from leadline.engine import wire
from leadline.engine.messages import CoreOutput, CoreRequest, PoolingRequest

__all__ = ["OutputSender", "out_address"]

_LINGER_MS = 2000


def out_address(directory: str, client: int) -> str:
    """Return the address at which API process `client` listens to the core."""
    return f"ipc://{directory}/out" if client == 0 else f"ipc://{directory}/out.{client}"


class OutputSender:
    """Belongs to the thread of the core's loop."""

    def __init__(self, context: Any, directory: str) -> None:
        self._context = context
        self._directory = directory
        self._sockets: dict[int, Any] = {}
        self._owners: dict[str, int] = {}
        """Request in the core → the API process that owns it; requests of process 0 are left out."""
        self.attach(0)

    def attach(self, client: int) -> None:
        socket = self._context.socket(zmq.PUSH)
        # No high-water mark: what is in flight is bounded by max_queued_requests and max_tokens, and a loop
        # that blocked on a slow reader would stall every other request.
        socket.set_hwm(0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)  # it may not listen yet
        socket.connect(out_address(self._directory, client))
        self._sockets[client] = socket

    def detach(self, client: int) -> list[str]:
        """Remove an API process. Returns the requests that it still owns."""
        socket = self._sockets.pop(client, None)
        if socket is not None:
            socket.close(linger=0)
        return [request_id for request_id, owner in self._owners.items() if owner == client]

    def register(self, requests: Sequence[CoreRequest | PoolingRequest], client: int) -> bool:
        """Record `client` as the owner of these requests. Returns False if that client has been detached."""
        if client not in self._sockets:
            return False
        if client:
            self._owners.update((request.request_id, client) for request in requests)
        return True

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the owners of requests that have ended."""
        if self._owners:
            for request_id in request_ids:
                self._owners.pop(request_id, None)

    def outputs(self, outputs: list[CoreOutput]) -> None:
        """Send one Outputs message, in order, to each API process that owns some of them."""
        owners = self._owners
        if not owners:
            self.send(wire.Outputs(outputs))
            return
        parts: dict[int, list[CoreOutput]] = {}
        for output in outputs:
            client = owners.get(output.request_id, 0)
            if client and output.finish_reason is not None:
                del owners[output.request_id]
            part = parts.get(client)
            if part is None:
                part = parts[client] = []
            part.append(output)
        for client, part in parts.items():
            self.send(wire.Outputs(part), client)

    def answer(self, message: wire.Reply | wire.Profiled) -> None:
        """Send to the API process that made the call."""
        self.send(message, wire.client_of(message.call_id))

    def send(self, message: wire.FromCore, client: int = 0) -> None:
        socket = self._sockets.get(client)
        if socket is not None:
            socket.send(wire.encode(message))

    def broadcast(self, message: wire.FromCore) -> None:
        frame = wire.encode(message)
        for socket in self._sockets.values():
            socket.send(frame)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=_LINGER_MS)
