"""HTTP/1.1 as clients speak it, well or badly, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_rig import CHAT, STREAM, Rig, busy, gateway_to, ok, pods, until

BODY = json.dumps(CHAT).encode()


def request(
    body: bytes = BODY, *lines: str, path: str = "/v1/chat/completions", version: str = "1.1"
) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return (head + "".join(line + "\r\n" for line in lines) + "\r\n").encode() + body


class Wire:
    """A client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, bare: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            if bare:
                body = b""
            elif headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
            return int(first.split(" ")[1]), headers, body

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def closed(self) -> bool:
        """The gateway closes the connection, without another byte."""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read(1) == b""
            return True


@contextlib.asynccontextmanager
async def wire(rig: Rig) -> AsyncIterator[Wire]:
    host, _, port = rig.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def connections(rig: Rig) -> set[Any]:
    """The gateway's ends of its clients' connections."""
    await until(lambda: rig.server.server_state.connections)
    return rig.server.server_state.connections


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_one_connection_carries_many_requests() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        for _ in range(5):
            client.send(request())
            status, headers, body = await client.answer()
            assert (status, json.loads(body)["object"]) == (200, "chat.completion")
            assert "connection" not in headers
        assert pod.connections == 1
        rig.assert_counts_are_zero()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        stream = json.dumps(STREAM).encode()
        client.send(request(stream) + request(path="/nowhere") + request(stream) + request(b"{") + request())
        seen = [await client.answer() for _ in range(5)]
        assert [status for status, _, _ in seen] == [200, 404, 200, 400, 200]
        assert seen[0][2].endswith(b"data: [DONE]\n\n")
        assert seen[2][2] == seen[0][2]
        await rig.settled()


async def test_a_long_body_that_is_here_before_its_request_begins_holds_up_no_later_request() -> None:
    long = request(json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 400_000}]}).encode())
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        (connection,) = await connections(rig)
        connection.data_received(long[:300_000])
        connection.data_received(long[300_000:])
        assert (await client.answer())[0] == 200
        client.send(request())
        assert (await client.answer())[0] == 200


async def test_many_pipelined_requests_do_not_pile_up() -> None:
    """A client is read no further than it is answered."""
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        client.send(request() * 300)
        for _ in range(300):
            assert (await client.answer())[0] == 200
        assert len(pod.completions) == 300


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_a_request_may_come_in_small_pieces(size: int) -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        whole = request()
        for start in range(0, len(whole), size):
            client.send(whole[start : start + size])
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200
        assert pod.completions[0].body == BODY


async def test_a_chunked_body_reaches_the_pod_whole_and_with_a_length() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        half = len(BODY) // 2
        parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:])]
        client.send(head + b"".join(parts) + b"0\r\n\r\n")
        assert (await client.answer())[0] == 200
        (got,) = pod.completions
        assert got.body == BODY
        assert got.one("content-length") == str(len(BODY))
        assert got.one("transfer-encoding") is None


async def test_head_gets_a_length_and_no_body() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        client.send(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = await client.answer(bare=True)
        assert status == 200
        assert int(headers["content-length"]) > 0
        client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[2] == b'{"status":"ok"}'


async def test_a_client_that_waits_to_send_its_body_is_told_to_go_on() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        head, _, body = request(BODY, "Expect: 100-continue").partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer())[0] == 200
        assert pod.completions[0].one("expect") is None


async def test_a_body_that_is_too_long_is_refused_while_it_is_being_sent() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address, max_body_bytes=1000) as rig, wire(rig) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head + b"%x\r\n%s\r\n" % (2000, b" " * 2000))
        status, headers, body = await client.answer()
        assert (status, error_of(body)["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"
        assert not pod.completions
    async with pods(ok) as (pod,), gateway_to(pod.address, max_body_bytes=1000) as rig, wire(rig) as client:
        client.send(request(b" " * 5_000_000))  # more than any buffer on the way: the answer must not be lost
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (413, "body_too_large")


async def test_a_head_that_does_not_come_is_answered_with_408() -> None:
    async with (
        pods(ok) as (pod,),
        gateway_to(pod.address, request_timeout=0.2) as rig,
        wire(rig) as client,
    ):
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        status, _, body = await client.answer()
        assert (status, error_of(body)["code"]) == (408, "request_timeout")
        assert await client.closed()
        await until(lambda: not rig.server.server_state.connections)


async def test_a_body_that_does_not_come_is_answered_with_408() -> None:
    async with (
        pods(ok) as (pod,),
        gateway_to(pod.address, request_timeout=0.2) as rig,
        wire(rig) as client,
    ):
        client.send(request()[:-1])
        status, headers, body = await client.answer()
        assert (status, error_of(body)["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        assert not pod.completions
        await rig.settled()
        assert await rig.metric("requests_total", code="408") == 1


async def test_a_slow_request_behind_a_running_one_does_not_disturb_it() -> None:
    async with (
        pods(busy) as (pod,),
        gateway_to(pod.address, request_timeout=0.1) as rig,
        wire(rig) as client,
    ):
        client.send(request() + b"POST /v1/chat/compl")
        await until(lambda: pod.completions)
        await asyncio.sleep(0.3)  # three times the deadline of the second
        assert pod.dropped == 0
        assert rig.gateway.in_flight == 1


async def test_a_body_behind_a_head_that_came_in_two_pieces_does_not_count_as_headers() -> None:
    """Go's clients cut heads of more than 4 KiB so, as other things on the way may."""
    long = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 50_000}]}).encode()
    sent = request(long, "X-Trace: " + "y" * 5_000)
    async with pods(ok) as (pod,), gateway_to(pod.address, max_header_bytes=8192) as rig, wire(rig) as client:
        (connection,) = await connections(rig)
        client.send(sent[:4096])
        await until(lambda: connection._open)
        client.send(sent[4096:] + sent[:4096])  # and the next one's is cut within this piece
        assert (await client.answer())[0] == 200
        await until(lambda: connection._open)
        client.send(sent[4096:])
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("more", [b"y" * 1000, b"X: y\r\n" * 100])
async def test_headers_without_end_are_answered_with_431(more: bytes) -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address, max_header_bytes=4096) as rig, wire(rig) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nX: ")
        answer = asyncio.ensure_future(client.answer())
        while not answer.done():
            client.send(more)
            await asyncio.sleep(0.002)
        status, _, body = answer.result()
        assert status == 431
        assert error_of(body)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_is_answered_with_400(sent: bytes) -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        client.send(sent)
        status, headers, body = await client.answer()
        assert (status, error_of(body)["code"]) == (400, "invalid_http")
        assert headers["connection"] == "close"
        assert not pod.completions


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_asks_to_close_gets_its_answer_and_then_the_end(version: str) -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        for body in (CHAT, STREAM):
            async with wire(rig) as client:
                client.send(request(json.dumps(body).encode(), "Connection: close", version=version))
                status, headers, got = await client.answer()
                assert status == 200
                assert headers["connection"] == "close"
                if body is STREAM:
                    assert got.endswith(b"data: [DONE]\n\n")
                    assert ("transfer-encoding" in headers) == (version == "1.1")
                assert await client.closed()


async def test_what_comes_behind_a_request_that_closes_is_ignored() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        client.send(request(BODY, "Connection: close") + request())
        assert (await client.answer())[0] == 200
        assert await client.closed()
        assert len(pod.completions) == 1


async def test_an_upgrade_is_not_taken_and_the_request_is_answered() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        client.send(request(BODY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"))
        assert (await client.answer())[0] == 200
        assert pod.completions[0].one("upgrade") is None
        assert pod.completions[0].body == BODY
        client.send(request())  # and the connection is as good as before
        assert (await client.answer())[0] == 200


async def test_an_idle_connection_is_closed_in_the_end() -> None:
    async with (
        pods(ok) as (pod,),
        gateway_to(pod.address, keep_alive=0.2) as rig,
        wire(rig) as silent,
        wire(rig) as client,
    ):
        client.send(request())
        assert (await client.answer())[0] == 200
        assert await client.closed()
        assert await silent.closed()


async def test_a_client_that_leaves_while_it_sends_its_body_is_counted_as_499() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        async with wire(rig) as client:
            client.send(request()[:-1])
            await until(lambda: rig.gateway.in_flight)
        await rig.settled()
        assert await rig.metric("requests_total", code="499") == 1


async def test_shutdown_closes_idle_connections_and_answers_running_requests_first() -> None:
    async with pods(busy) as (pod,), gateway_to(pod.address) as rig, wire(rig) as idle, wire(rig) as client:
        client.send(request(json.dumps({**CHAT, "deadline": 0.5}).encode()))
        await until(lambda: pod.completions)
        rig.server.should_exit = True
        assert await idle.closed()
        status, headers, _ = await client.answer()
        assert status == 504
        assert headers["connection"] == "close"
        assert await client.closed()
