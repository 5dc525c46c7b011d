"""Server-sent events over asyncio's own streams: as little as a load generator needs, so that it measures the
server and not a client library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from leadline.cli.http import ServerError

__all__ = ["post_events"]


async def post_events(
    url: str,
    path: str,
    body: Any,
    api_key: str | None = None,
    *,
    on_head: Callable[[dict[str, str]], None] | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """POST and yield the decoded data of each event up to [DONE]. `on_head` gets the answer's headers, all in
    lower case. Raises ServerError for refusals and for error events, OSError or EOFError when the connection
    breaks."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
    )
    try:
        payload = json.dumps(body).encode()
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {prefix}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        await writer.drain()
        status, headers = await _head(reader)
        if on_head is not None:
            on_head(headers)
        chunks = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
        if status != 200:
            text = b"".join([chunk async for chunk in chunks]).decode(errors="replace")
            raise ServerError(f"{path} answered {status}: {_message(text)}")
        async for data in _data(chunks):
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(event["error"]["message"])
            yield event
        raise EOFError("the stream ended without [DONE]")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readuntil(b"\r\n")).decode("latin-1").split(" ", 2)
    headers = {}
    while (line := (await reader.readuntil(b"\r\n")).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(first[1]), headers


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(65536):
        yield chunk


async def _data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
