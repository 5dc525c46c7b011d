"""Many streams at once: a mock engine that sends them, and clients that read them.

    python benchmarks/gateway_streams.py mock PORT [--pieces 40]
    python benchmarks/gateway_streams.py read URL [--streams 300] [--pieces 40]

The mock engine answers every chat with a chunk every 50 ms. The clients start together, all of them in one
process, and print what came, times in milliseconds, as one JSON object: how many streams were whole, the
median time to the first chunk (`first_p50`), and the gaps between two (`itl_p50`, `itl_p99`). gateway_http.py
puts routers between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from typing import Any

__all__ = ["BODY", "MODELS"]

BODY = json.dumps(
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        "max_tokens": 8,
    }
)
"""What is asked."""
MODELS = '{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"mock"}]}'
"""What the mock engines say they serve."""


class StreamingMock(asyncio.Protocol):
    """Answers every POST with a stream of chunks, anything else with an empty list of models."""

    pieces = 40
    interval = 0.05

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head.lower())
        if not blank or len(body) < int(found[1] if found else 0):
            return
        self._data = b""
        if not head.startswith(b"POST"):
            text = MODELS.encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(text), text)
            )
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._piece(0)

    def _piece(self, number: int) -> None:
        if self._transport.is_closing():
            return
        last = number == self.pieces
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": f" {number}"}}]}
        text = b"data: " + (b"[DONE]" if last else json.dumps(chunk).encode()) + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(text), text) + (b"0\r\n\r\n" if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(self.interval, self._piece, number + 1)


async def serve_streams(port: int, pieces: int) -> None:
    StreamingMock.pieces = pieces
    server = await asyncio.get_running_loop().create_server(StreamingMock, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


async def read_streams(url: str, streams: int, pieces: int) -> dict[str, float]:
    """All at once; gaps between chunks in ms."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    gaps: list[float] = []
    firsts: list[float] = []

    async def one() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            began = last = time.perf_counter()
            writer.write(request)
            seen, text = 0, b""
            while b"data: [DONE]" not in text:
                data = await reader.read(65536)
                if not data:
                    return False
                now = time.perf_counter()
                text += data
                count = text.count(b"data: ")
                if count > seen:
                    (gaps if seen else firsts).append((now - (last if seen else began)) * 1000)
                    last, seen = now, count
            return text.count(b"data: ") == pieces + 1
        finally:
            writer.close()

    whole = await asyncio.gather(*[one() for _ in range(streams)])
    ordered = sorted(gaps)
    return {
        "whole": sum(whole),
        "first_p50": statistics.median(firsts),
        "itl_p50": statistics.median(ordered),
        "itl_p99": ordered[int(0.99 * (len(ordered) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("role", choices=("mock", "read"))
    parser.add_argument("place", help="the port of the mock engine, or the URL to read from")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--pieces", type=int, default=40)
    given = parser.parse_args()
    if given.role == "mock":
        asyncio.run(serve_streams(int(given.place), given.pieces))
    else:
        print(json.dumps(asyncio.run(read_streams(given.place, given.streams, given.pieces))))


if __name__ == "__main__":
    main()
