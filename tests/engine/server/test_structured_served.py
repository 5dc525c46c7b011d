"""Structured output as a server gives it: a failing grammar is an error, no stream waits for another's."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from live_server import LiveServer

WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
MONSTERS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "wide", "schema": WIDE}}},
    {"regex": "a" * 300_000},
    {"regex": r"(\w{1,300} ?){1,300}"},
    {"grammar": 'start: "a" start'},
]


def post(server: LiveServer, **body: object) -> httpx.Response:
    return server.post("/v1/completions", **{"prompt": "Once upon a time", "temperature": 0, **body})


def test_a_grammar_that_fails_in_mid_output_is_an_error(server: LiveServer) -> None:
    """It was `finish_reason: stop`, a 200, with half an answer. Here the process of the grammar is killed."""
    endless = {"regex": "[a-z ]{400}", "max_tokens": 400}
    with ThreadPoolExecutor(1) as pool, server.http as http:
        plain = pool.submit(post, server, **endless)
        body = {"prompt": "Once upon a time", "stream": True, **endless}
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            events = [json.loads(next(lines)[6:])]
            (nursery,) = [
                child
                for child in psutil.Process(server.process.pid).children(recursive=True)
                if "leadline.engine.grammars.host" in child.cmdline() and child.children()
            ]
            for host in nursery.children():
                host.kill()
            events += [json.loads(line[6:]) for line in lines]
        whole = plain.result()
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert whole.status_code == 500
    assert whole.headers["x-should-retry"] == "false"
    for error in (events[-1]["error"], whole.json()["error"]):
        assert (error["code"], error["type"]) == ("structured_output_failed", "server_error")
    assert "failed in the middle of the answer" in server.log
    assert "Traceback" not in server.log
    assert post(server, regex="(yes|no)", max_tokens=8).json()["choices"][0]["text"] in ("yes", "no")


def test_streams_go_on_while_monsters_are_compiled(server: LiveServer) -> None:
    """Compiling 4,000 optional properties stopped every stream of the engine for seconds."""
    wanted = {"prompt": "The sea is", "max_tokens": 24, "ignore_eos": True, "stream": True}
    shape = r"( [a-z]{1,12}){4}"
    with ThreadPoolExecutor(8) as pool, server.http as http:
        others = pool.submit(post, server, regex=shape, max_tokens=100)
        with http.stream("POST", "/v1/completions", json=wanted) as response:
            pieces: list[str] = []
            meanwhile = 0
            monsters = []
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 3:
                    monsters = [pool.submit(post, server, max_tokens=8, **body) for body in MONSTERS]
                meanwhile += bool(monsters) and not monsters[0].done()
        assert len(pieces) >= 16
        assert re.fullmatch(shape, others.result().json()["choices"][0]["text"])
        wide, long, nested, endless = (monster.result() for monster in monsters)
        assert meanwhile >= 5, "tokens while the wide schema was compiled"
    for refused in (wide, long, endless):
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "invalid_grammar"
    # Its trial lasts a quarter of a second; whether it meets the library's limit depends on the machine.
    assert nested.status_code == 200 or nested.json()["error"]["code"] == "invalid_grammar"
    assert wide.json()["error"]["param"] == "response_format"
    assert long.json()["error"]["param"] == "regex"
