"""Pages of allowed origins may call the engine and the gateway, all others may not; streams cost nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_rig import CHAT, gateway_to, ok, pods, status
from test_http_edges import BOTH, engine

from leadline.gateway.config.settings import GatewayConfig, ServerConfig
from leadline.gateway.errors import ConfigError
from leadline.protocol.http.cors import invalid_origin

PAGE = "https://app.example"
ALLOWED = "access-control-allow-origin"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@contextlib.asynccontextmanager
async def server(kind: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server of that kind; the engine's model is still loading."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "engine":
            url = f"http://127.0.0.1:{await stack.enter_async_context(engine(**settings))}"
        else:
            (pod,) = await stack.enter_async_context(pods(ok))
            url = (await stack.enter_async_context(gateway_to(pod.address, **settings))).url
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))


@BOTH
async def test_an_allowed_page_may_ask_and_read(kind: str) -> None:
    keys = {"api_keys": ("secret",)} if kind == "engine" else {}
    async with server(kind, cors_origins=(PAGE, "http://localhost:3000"), **keys) as client:
        before = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (before.status_code, before.content) == (204, b"")
        assert before.headers[ALLOWED] == PAGE
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in before.headers
        for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
            method = "POST" if "chat" in path else "GET"
            got = await client.request(method, path, json=CHAT, headers={"Origin": PAGE})
            assert got.headers[ALLOWED] == PAGE, path  # of errors too, so that the page can read them
            assert "Origin" in got.headers["vary"]
            assert "x-request-id" in got.headers["access-control-expose-headers"]
        plain = await client.get("/v1/models")
        assert ALLOWED not in plain.headers


@BOTH
async def test_other_pages_may_not(kind: str) -> None:
    async with server(kind, cors_origins=(PAGE,)) as client:
        for origin in ("https://evil.example", PAGE + ".evil.example", PAGE.upper(), "null", ""):
            headers = PREFLIGHT | {"Origin": origin}
            before = await client.options("/v1/chat/completions", headers=headers)
            got = await client.get("/v1/models", headers={"Origin": origin})
            assert before.status_code == 405
            assert ALLOWED not in [*before.headers, *got.headers], origin


@BOTH
async def test_a_star_allows_any_page_and_nothing_allows_none(kind: str) -> None:
    async with server(kind, cors_origins=("*",)) as client:
        got = await client.get("/v1/models", headers={"Origin": "https://any.example"})
        assert got.headers[ALLOWED] == "*"
        # Without the question that only preflights ask it is a request like others.
        assert (await client.options("/v1/models", headers={"Origin": PAGE})).status_code == 405
    async with server(kind) as client:
        assert ALLOWED not in (await client.get("/v1/models", headers={"Origin": PAGE})).headers
        assert (await client.options("/v1/models", headers=PREFLIGHT)).status_code == 405


async def test_what_a_pod_says_of_pages_does_not_count() -> None:
    open_pod = status(200, "Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true")
    async with (
        pods(open_pod) as (pod,),
        gateway_to(pod.address, cors_origins=(PAGE,)) as rig,
        rig.client() as client,
    ):
        for origin, allowed in ((PAGE, [PAGE]), ("https://evil.example", [])):
            got = await client.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
            assert got.status_code == 200
            assert got.headers.get_list(ALLOWED) == allowed
            assert "access-control-allow-credentials" not in got.headers


async def test_a_stream_has_the_headers_and_a_connection_serves_on_behind_a_preflight() -> None:
    async with server("gateway", cors_origins=(PAGE,)) as client:
        for _ in range(2):
            assert (await client.options("/v1/chat/completions", headers=PREFLIGHT)).status_code == 204
            body = CHAT | {"stream": True}
            got = await client.post("/v1/chat/completions", json=body, headers={"Origin": PAGE})
            assert (got.status_code, got.headers[ALLOWED]) == (200, PAGE)


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/", "https://*.example", "https://a b", "null"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(wrong: str) -> None:
    assert invalid_origin([PAGE, "*", wrong]) == wrong
    with pytest.raises(ConfigError, match="cors_origins"):
        GatewayConfig(server=ServerConfig(cors_origins=[wrong])).validate()
