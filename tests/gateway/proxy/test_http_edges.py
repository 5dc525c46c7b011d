"""Engine and gateway answer the same odd bytes in the same way, and hold clients to the same limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_rig import CHAT, gateway_to, ok, pods, until
from test_client_connections import Wire

from leadline.engine.server import ServerSettings, create_app
from leadline.engine.server.process.listening import http_server

BODY = json.dumps(CHAT).encode()
BOTH = pytest.mark.parametrize("kind", ["engine", "gateway"])


@contextlib.asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[int]:
    """The port of an engine's HTTP server, whose model is still loading."""
    listener = socket.create_server(("127.0.0.1", 0))
    chosen = ServerSettings(**settings)
    server = http_server(create_app(None, chosen), chosen)
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        await until(lambda: server.started or task.done())
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def clients(kind: str, count: int = 1, **settings: Any) -> AsyncIterator[list[Wire]]:
    """Connections to a server of that kind."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "engine":
            port = await stack.enter_async_context(engine(**settings))
        else:
            (pod,) = await stack.enter_async_context(pods(ok))
            rig = await stack.enter_async_context(gateway_to(pod.address, **settings))
            port = int(rig.url.rpartition(":")[2])
        wires = [Wire(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)]
        try:
            yield wires
        finally:
            for one in wires:
                one.writer.close()


def post(*lines: str, body: bytes = BODY, path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: evil.example", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: evil.example", *lines, "", ""]).encode()


TWO_KEYS = ("Authorization: Bearer a", "Authorization: Bearer b")
REFUSED = {
    "a gzip body": (post("Content-Encoding: gzip"), 415, "content_encoding"),
    "a brotli body": (post("Content-Encoding: br"), 415, "content_encoding"),
    "encodings in a row": (post("Content-Encoding: identity, gzip"), 415, "content_encoding"),
    "a gzip body for another path": (
        post("Content-Encoding: gzip", path="/tokenize"),
        415,
        "content_encoding",
    ),
    "two keys": (post(*TWO_KEYS), 400, "invalid_http"),
    "two keys of a GET": (get("/v1/models", *TWO_KEYS), 400, "invalid_http"),
    "headers of 80 KiB": (get("/health", "X: " + "y" * 80_000), 431, "headers_too_large"),
    "many headers": (get("/health", *["X: y"] * 30_000), 431, "headers_too_large"),
    "a body announced as too long": (post("X: y", body=b" " * 2000), 413, "body_too_large"),
    "a slash behind the path": (post(path="/v1/chat/completions/"), 404, None),
    "a slash behind a GET": (get("/health/"), 404, None),
    "HEAD of a POST": (get("/v1/chat/completions", method="HEAD"), 405, None),
    "GET of a POST": (get("/v1/completions"), 405, None),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
    "two lengths": (post("Content-Length: 3"), 400, "invalid_http"),
    "CONNECT": (get("a:1", method="CONNECT"), 400, "invalid_http"),
}


@BOTH
@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_served_gets_the_same_answer_from_both(kind: str, what: str) -> None:
    sent, expected, code = REFUSED[what]
    async with clients(kind, max_body_bytes=1000) as (client,):
        client.send(sent)
        bare = sent.startswith(b"HEAD")
        status, headers, body = await client.answer(bare=bare)
        assert status == expected
        assert "location" not in headers
        if not bare:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["code"], error["type"]) == (
                code,
                "not_found_error" if status == 404 else "invalid_request_error",
            )


@BOTH
async def test_a_body_in_plain_is_taken_whatever_identity_is_called(kind: str) -> None:
    async with clients(kind) as (client,):
        client.send(post("Content-Encoding: Identity "))
        assert (await client.answer())[0] == (503 if kind == "engine" else 200)


@BOTH
@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models", "/ready"])
async def test_head_is_answered_as_get_without_the_body(kind: str, path: str) -> None:
    async with clients(kind) as (client,):
        client.send(get(path))
        got, headers, body = await client.answer()
        client.send(get(path, method="HEAD"))
        status, bare, _ = await client.answer(bare=True)
        assert status == got
        assert bare["content-type"] == headers["content-type"]
        if path != "/metrics":  # its text changes from one moment to the next
            assert bare["content-length"] == str(len(body))
        client.send(get("/health"))  # and the connection goes on
        assert (await client.answer())[0] == 200


@BOTH
@pytest.mark.parametrize("cut", [30, -1], ids=["in its headers", "in its body"])
async def test_a_request_that_never_arrives_whole_is_answered_with_408(kind: str, cut: int) -> None:
    async with clients(kind, request_timeout=0.2) as (client,):
        client.send(post()[:cut])
        status, headers, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"


@BOTH
async def test_headers_without_end_are_broken_off_after_64_kib(kind: str) -> None:
    """60 MB of them were once taken."""
    async with clients(kind) as (client,):
        client.send(b"GET /health HTTP/1.1\r\nX: ")
        answer, sent = asyncio.ensure_future(client.answer()), 0
        while not answer.done() and sent < 60 << 20:
            client.send(b"y" * 1000)
            sent += 1000
            await asyncio.sleep(0.001)
        assert answer.result()[0] == 431
        assert sent < 1 << 20


@BOTH
async def test_a_connection_without_a_request_is_closed_after_the_keep_alive(kind: str) -> None:
    async with clients(kind, count=2, keep_alive=0.2) as (silent, client):
        client.send(get("/health"))
        assert (await client.answer())[0] == 200
        assert await client.closed()
        assert await silent.closed()


def test_connections_are_kept_longer_than_proxies_pool_them() -> None:
    from leadline.gateway.config.settings import GatewayConfig

    assert ServerSettings().keep_alive == GatewayConfig().server.keep_alive_seconds == 120
