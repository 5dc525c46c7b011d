"""Tokens that go straight to the socket look like those that go through ASGI, and wait like them for a client
that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_core import SLOW

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.config import EngineConfig
from leadline.engine.hub import resolve_model
from leadline.engine.server import ServerSettings, create_app
from leadline.engine.server.http.responses import sse
from leadline.engine.server.http.socket_writer import EventTemplate, SocketWriter
from leadline.engine.server.metrics.metrics import Metrics
from leadline.engine.server.process.listening import http_server
from leadline.protocol.openai.answers import ChatChunkChoice, ChatCompletionChunk, ChatDelta

COUNT = 50
TOKENS = 400


def chunk(text: str, usage: Any = msgspec.UNSET, token_ids: Any = msgspec.UNSET) -> ChatCompletionChunk:
    choice = ChatChunkChoice(index=3, delta=ChatDelta(content=text), token_ids=token_ids)
    return ChatCompletionChunk(id="chatcmpl-1", created=7, model='odd "name"', choices=[choice], usage=usage)


@given(st.text(), st.sampled_from([None, msgspec.UNSET]))
def test_a_template_gives_the_event_that_encoding_the_chunk_gives(text: str, usage: Any) -> None:
    assert EventTemplate(chunk(EventTemplate.TEXT, usage)).event(text, [1]) == sse(chunk(text, usage))


@given(st.text(), st.lists(st.integers(0, 200_000), min_size=1), st.sampled_from([None, msgspec.UNSET]))
def test_a_template_with_token_ids_does_too(text: str, token_ids: list[int], usage: Any) -> None:
    template = EventTemplate(chunk(EventTemplate.TEXT, usage, EventTemplate.IDS))
    assert template.event(text, token_ids) == sse(chunk(text, usage, token_ids))


def test_a_template_needs_its_mark() -> None:
    with pytest.raises(ValueError, match="TEXT"):
        EventTemplate(chunk("hello"))


@dataclass
class Site:
    engine: AsyncEngine
    metrics: Metrics
    port: int
    direct: list[bytes]
    """Events that did not go through ASGI."""

    async def open(self, body: dict[str, Any], **options: Any) -> tuple[asyncio.StreamReader, Any]:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=client, **options)
        data = json.dumps({"model": self.engine.served_name, "stream": True, **body}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        await writer.drain()
        return reader, writer


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """A server over the scripted core, whose sockets hold little. Its parameter, if there is one: fields of
    ServerSettings."""
    settings = ServerSettings(**getattr(request, "param", {}))
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = str(resolve_model("smollm2", progress=False).path)
    engine = await AsyncEngine.start(EngineConfig(model=path), factory="scripted_core:build")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    app = create_app(engine, settings)
    server = http_server(app, settings)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    direct: list[bytes] = []
    write = SocketWriter.write
    monkeypatch.setattr(
        SocketWriter, "write", lambda self, event: (direct.append(event), write(self, event))[1]
    )
    try:
        yield Site(engine, app.state.server.metrics, listener.getsockname()[1], direct)
    finally:
        server.should_exit = True
        await http
        await engine.stop()


def texts(answer: bytes) -> list[str]:
    """Of the events of a chunked answer; raises where the framing or an event is wrong."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        assert body[length : length + 2] == b"\r\n"
        whole, body = whole + body[:length], body[length + 2 :]
    events = whole.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    return [chunk["choices"][0]["text"] for chunk in chunks]


async def read(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(-1), 60)


async def test_most_tokens_of_a_stream_go_straight_to_the_socket(site: Site) -> None:
    reader, writer = await site.open({"prompt": [SLOW], "max_tokens": 20})
    said = texts(await read(reader))
    writer.close()
    assert "".join(said) == site.engine.tokenizer.decode(list(range(100, 120)))
    assert len(site.direct) >= 10


async def test_token_ids_come_along_for_those_who_ask(site: Site) -> None:
    body = {"prompt": [SLOW], "max_tokens": 20, "return_token_ids": True}
    reader, writer = await site.open({**body, "stream_options": {"include_usage": True}})
    answer = (await read(reader)).decode()
    writer.close()
    chunks = [json.loads(line[6:]) for line in answer.split("\r\n") if line.startswith("data: {")]
    *middle, last = chunks
    assert [i for chunk in middle for i in chunk["choices"][0]["token_ids"]] == list(range(100, 120))
    assert all(chunk["usage"] is None for chunk in middle)
    assert last["usage"]["completion_tokens"] == 20
    assert len(site.direct) >= 10


async def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing(site: Site) -> None:
    whole = site.engine.tokenizer.decode(list(range(100, 100 + TOKENS)))
    lazy, lazy_writer = await site.open({"prompt": [COUNT], "max_tokens": TOKENS}, limit=1)
    for _ in range(2):
        reader, writer = await site.open({"prompt": [COUNT], "max_tokens": TOKENS})
        assert "".join(texts(await read(reader))) == whole
        writer.close()
    assert site.engine.num_in_flight == 1  # its answer is longer than what sockets and buffers hold
    assert "".join(texts(await read(lazy))) == whole
    lazy_writer.close()


@pytest.mark.parametrize("site", [{"write_timeout": 0.5}], indirect=True)
async def test_a_client_that_never_reads_is_cut_off_and_frees_its_request(site: Site) -> None:
    reader, writer = await site.open({"prompt": [COUNT], "max_tokens": TOKENS}, limit=1)
    text = ""
    async with asyncio.timeout(20):
        while "stalled_clients_total 1.0" not in text:
            await asyncio.sleep(0.02)
            text = site.metrics.render().decode()
        while site.engine.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read(-1)).endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_client_that_leaves_ends_its_request(site: Site) -> None:
    reader, writer = await site.open({"prompt": [SLOW], "max_tokens": TOKENS})
    async with asyncio.timeout(20):
        while len(site.direct) < 2:
            await reader.read(4096)
    writer.transport.abort()
    async with asyncio.timeout(20):
        while site.engine.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(site.direct) < 100


async def test_choices_of_a_stream_keep_their_numbers(site: Site) -> None:
    reader, writer = await site.open({"prompt": [SLOW], "max_tokens": 12, "n": 3, "temperature": 1})
    answer = (await read(reader)).decode()
    writer.close()
    for index in range(3):
        said = ""
        for line in answer.split("\r\n"):
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                said += choice["text"] if choice["index"] == index else ""
        assert said == site.engine.tokenizer.decode(list(range(100, 112)))
    with contextlib.suppress(OSError):
        writer.close()
