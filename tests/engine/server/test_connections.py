"""What comes over a connection beside plain HTTP/1.1 requests, and what every answer brings along."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from live_server import LiveServer

BODY = json.dumps({"prompt": "Hello", "max_tokens": 2, "temperature": 0}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
"""What Java's HTTP client writes into its first request to an http:// address."""


def post(body: bytes, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST /v1/completions HTTP/%b\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (
        version,
        headers,
        len(body),
        body,
    )


def connect(server: LiveServer) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def answers(server: LiveServer, *pieces: bytes) -> list[tuple[bytes, bytes]]:
    """(head, body) of each answer of a connection that the server closes; its bodies have a length."""
    with connect(server) as client, client.makefile("rb") as file:
        for piece in pieces:
            client.sendall(piece)
        found = []
        while head := b"".join(iter(file.readline, b"\r\n") if file.peek(1) else ()):
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            found.append((head, file.read(int(length.split(b":")[1]))))
        return found


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_client_that_would_rather_speak_http2_is_answered(
    server: LiveServer, chunked: bool, split: bool
) -> None:
    request = post(BODY, H2C)
    if chunked:
        head, _, _ = request.partition(b"Content-Length")
        request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    cut = request.index(b"\r\n\r\n") + 4 if split else len(request)
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    (head, body), (_, models) = answers(server, request[:cut], request[cut:], last)
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["usage"]["completion_tokens"] == 2
    assert json.loads(models)["object"] == "list"


def test_http_1_0_gets_a_stream_without_chunks(server: LiveServer) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "stream": True}).encode()
    with connect(server) as client, client.makefile("rb") as file:
        client.sendall(post(body, version=b"1.0"))
        head, _, events = file.read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    *chunks, done, end = events.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(chunks[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_refused_in_openais_shape(server: LiveServer, data: bytes) -> None:
    ((head, body),) = answers(server, data)
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
        ("DELETE", "/v1/models", None),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/tokenize", {"prompt": "a"}),
    ],
)
def test_every_answer_has_a_request_id(server: LiveServer, method: str, path: str, body: Any) -> None:
    with server.http as http:
        made = [http.request(method, path, json=body).headers["x-request-id"] for _ in range(2)]
        assert len(set(made)) == 2
        own = http.request(method, path, json=body, headers={"X-Request-ID": "mine-1"})
        assert own.headers.get_list("x-request-id") == ["mine-1"]
        odd = http.request(method, path, json=body, headers={"X-Request-ID": "no good"})
        assert odd.headers["x-request-id"] not in ("", "no good")


def test_openais_client_shows_the_request_id(server: LiveServer) -> None:
    answer = server.client.completions.create(
        model="smollm2", prompt="a", max_tokens=1, extra_headers={"X-Request-ID": "mine-2"}
    )
    assert answer._request_id == "mine-2"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("nothing")
    assert caught.value.request_id


def test_a_client_that_leaves_with_requests_behind_the_running_one_frees_it(server: LiveServer) -> None:
    server.until(lambda: server.metric("running_requests") == 0)
    long = json.dumps({"prompt": "Count: one", "max_tokens": 450, "ignore_eos": True})
    generated = server.metric("generation_tokens_total")
    with connect(server) as client:
        client.sendall(post(long.encode()) + post(BODY))
        server.until(lambda: server.metric("running_requests") > 0)
    server.until(lambda: server.metric("running_requests") == 0)
    assert server.metric("generation_tokens_total") - generated < 200
