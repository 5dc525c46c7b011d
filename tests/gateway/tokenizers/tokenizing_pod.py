"""The two paths of an engine that concern its tokenizer, with every fault that a pod can have, on demand."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from aiohttp import web

from leadline.gateway.pods import Pod
from leadline.protocol.errors import RequestError
from leadline.protocol.load import LoadReport
from leadline.protocol.openai.service import TokenizeRequest, TokenizeResponse
from leadline.protocol.text.bundle import bundle_digest, encode_bundle
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import prompt_inputs, prompt_token_ids
from leadline.protocol.text.tokenizer import Tokenizer


@functools.cache
def _loaded(folder: Path) -> tuple[bytes, Tokenizer, ChatRenderer]:
    tokenizer = Tokenizer.load(folder)
    return (
        encode_bundle(tokenizer),
        tokenizer,
        ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens),
    )


class TokenizingPod:
    """A pod that tokenizes with the files in a folder. Attributes may be changed at any time."""

    def __init__(self) -> None:
        self.bundle = b""
        self.tag = ""
        self.status = 200
        """Of /admin/tokenizer."""
        self.names = ["m"]
        self.key = ""
        """When not empty, what Authorization must hold."""
        self.fetched = 0
        """Times the bundle was sent whole."""
        self.asked = 0
        self.address = ""

    def run(self, folder: Path) -> str:
        """Become a pod with that tokenizer; its digest."""
        self.bundle, self._tokenizer, self._renderer = _loaded(folder)
        self.tag = bundle_digest(self.bundle)
        return self.tag

    def report(self, digest: str) -> LoadReport:
        return LoadReport(
            pod="pod",
            address=self.address,
            epoch="e",
            time=time.time(),
            model="m",
            block_size=16,
            tokenizer=digest,
        )

    def as_pod(self, digest: str = "", name: str = "pod", ready: bool = True) -> Pod:
        pod = Pod(name, self.address, ready=ready)
        if digest:
            pod.heartbeat(self.report(digest), time.monotonic())
        return pod

    async def serve_bundle(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if self.status in (301, 302, 307):
            raise web.HTTPFound("/elsewhere")
        if self.status != 200:
            return web.Response(status=self.status)
        if request.headers.get("If-None-Match") == f'"{self.tag}"':
            return web.Response(status=304)
        self.fetched += 1
        return web.Response(body=self.bundle, headers={"ETag": f'"{self.tag}"'})

    async def models(self, _: web.Request) -> web.StreamResponse:
        cards = [{"id": name, "max_model_len": None, "permission": []} for name in self.names]
        return web.json_response({"object": "list", "data": cards})

    async def elsewhere(self, _: web.Request) -> web.StreamResponse:
        raise AssertionError("a redirect was followed")

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=TokenizeRequest)
        try:
            (prompt,) = prompt_inputs(body, self._renderer, self._tokenizer)
            ids = prompt_token_ids(prompt, self._tokenizer)
        except RequestError:
            return web.Response(status=400)
        answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=512)
        return web.Response(body=msgspec.json.encode(answer))


@contextlib.asynccontextmanager
async def tokenizing_pod() -> AsyncIterator[TokenizingPod]:
    pod = TokenizingPod()
    app = web.Application()
    app.router.add_get("/admin/tokenizer", pod.serve_bundle)
    app.router.add_get("/v1/models", pod.models)
    app.router.add_get("/elsewhere", pod.elsewhere)
    app.router.add_post("/tokenize", pod.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = site._server
    assert server is not None
    pod.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield pod
    finally:
        await runner.cleanup()
