"""The engine core's way out: a socket for each API process, and whose each request is.

    Outputs of a step ──▶ by owner ──▶ SOCKET_DIR/out      API process 0, which started the core
                                   └─▶ SOCKET_DIR/out.N    API process N, attached later

Belongs to the core loop's thread. Most cores talk to one API process: then nothing is sorted and nobody is
noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import zmq

from leadline.engine import wire
from leadline.engine.messages import CoreOutput, CoreRequest

__all__ = ["Outbox", "out_address"]

_LAST_WORDS_MS = 2000


def out_address(directory: str, client: int) -> str:
    """Where API process `client` listens to the core."""
    return f"ipc://{directory}/out" if client == 0 else f"ipc://{directory}/out.{client}"


class Outbox:
    def __init__(self, context: Any, directory: str) -> None:
        self._context = context
        self._directory = directory
        self._sockets: dict[int, Any] = {}
        self._owners: dict[str, int] = {}
        """Request in the core → its API process; those of 0 are left out."""
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
        """Forget an API process; returns the requests that are still its own."""
        socket = self._sockets.pop(client, None)
        if socket is not None:
            socket.close(linger=0)
        return [request_id for request_id, owner in self._owners.items() if owner == client]

    def own(self, requests: Sequence[CoreRequest], client: int) -> bool:
        """Note whose requests these are. False: nobody's any more, its last words came after its end."""
        if client not in self._sockets:
            return False
        if client:
            self._owners.update((request.request_id, client) for request in requests)
        return True

    def disown(self, request_ids: Iterable[str]) -> None:
        """The core has nothing more to say of them."""
        if self._owners:
            for request_id in request_ids:
                self._owners.pop(request_id, None)

    def outputs(self, outputs: list[CoreOutput]) -> None:
        """One Outputs message to each API process that has some, in their order."""
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
        """To whoever made the call."""
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
            socket.close(linger=_LAST_WORDS_MS)
