"""A gateway whose tokenizer or template is not the engine's finds out (row P21)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leadline.gateway.tokens.parity import PROBES, check_parity
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import RequestError, encode_error
from leadline.protocol.openai import decode_body
from leadline.protocol.openai.service import TokenizeRequest, TokenizeResponse
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import prompt_inputs, prompt_token_ids
from leadline.protocol.text.tokenizer import Tokenizer

Handler = Callable[[web.Request], Awaitable[web.Response]]


def engine_with(tokenizer: Tokenizer, **templates: str) -> Handler:
    """`/tokenize` as the engine's server answers it."""
    renderer = ChatRenderer({**tokenizer.chat_templates, **templates}, tokenizer.special_tokens)

    async def tokenize(request: web.Request) -> web.Response:
        body = decode_body(await request.read(), TokenizeRequest)
        try:
            (prompt,) = prompt_inputs(body, renderer, tokenizer)
        except RequestError as error:
            return web.Response(status=400, body=encode_error(error.message))
        ids = prompt_token_ids(prompt, tokenizer)
        answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=8192)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    return tokenize


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/tokenize", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield session, str(server.make_url("/"))


@pytest.fixture
def service(tokenizer):
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    service = TokenService(tokenizer, renderer)
    yield service
    service.close()


async def test_the_same_files_agree(service, smollm_folder):
    async with serving(engine_with(Tokenizer.load(smollm_folder))) as (session, url):
        report = await check_parity(session, url, service)
    assert report.agrees is True
    assert [result.probe for result in report.results] == list(PROBES)
    assert "agrees" in str(report)


async def test_another_tokenizer_is_noticed_and_the_place_named(service, tokenizers_by_family):
    async with serving(engine_with(tokenizers_by_family["llama3"])) as (session, url):
        report = await check_parity(session, url, service)
    assert report.agrees is False
    assert "differs from token" in str(report)


async def test_another_template_is_noticed_by_the_chats_alone(service, smollm_folder, tokenizer):
    template = tokenizer.chat_template.replace("helpful", "useful")
    async with serving(engine_with(Tokenizer.load(smollm_folder), default=template)) as (session, url):
        report = await check_parity(session, url, service)
    assert report.agrees is False
    by_probe = {result.probe: result.agrees for result in report.results}
    assert by_probe["text"] is True
    assert by_probe["chat"] is False


async def test_a_template_that_only_one_of_them_refuses_by_is_a_difference(service, smollm_folder):
    refusing = "{{ raise_exception('no') }}"
    async with serving(engine_with(Tokenizer.load(smollm_folder), default=refusing)) as (session, url):
        report = await check_parity(session, url, service)
    assert {r.probe: r.agrees for r in report.results}["chat"] is False
    assert "the engine refuses it" in str(report)


async def test_a_model_without_a_template_agrees_on_refusing_chats(smollm_folder):
    bare = Tokenizer.load(smollm_folder)
    bare.chat_templates = {}
    service = TokenService(bare, ChatRenderer({}, {}))
    async with serving(engine_with(bare)) as (session, url):
        report = await check_parity(session, url, service)
    assert report.agrees is True
    service.close()


async def test_an_engine_that_cannot_answer_is_no_difference(service, unused_tcp_port):
    async with aiohttp.ClientSession() as session:
        report = await check_parity(session, f"http://127.0.0.1:{unused_tcp_port}", service)
    assert report.agrees is None
    assert "could not be compared" in str(report)

    async def unauthorized(_: web.Request) -> web.Response:
        return web.Response(status=401, text="{}")

    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    for handler in (unauthorized, nonsense):
        async with serving(handler) as (session, url):
            assert (await check_parity(session, url, service)).agrees is None


async def test_headers_reach_the_engine(service, smollm_folder):
    tokenize = engine_with(Tokenizer.load(smollm_folder))

    async def keyed(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer k":
            return web.Response(status=401)
        return await tokenize(request)

    async with serving(keyed) as (session, url):
        report = await check_parity(session, url, service, headers={"Authorization": "Bearer k"})
    assert report.agrees is True
