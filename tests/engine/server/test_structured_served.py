"""Structured output as a server gives it: a failing grammar is an error, no stream waits for another's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live_server import LiveServer

LEAD = "This is said first, and it is long enough for a trial of some tokens to end before the rest begins; "
LATE = LEAD + r"(.{0,2000}[a-z]{3}){1,40}[.,]"
"""Runs into a limit of the library, far behind its start."""
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
MONSTERS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "wide", "schema": WIDE}}},
    {"regex": "a" * 300_000},
    {"regex": LATE},
    {"grammar": 'start: "a" start'},
]


def post(server: LiveServer, **body: object) -> httpx.Response:
    return server.post("/v1/completions", **{"prompt": "Once upon a time", "temperature": 0, **body})


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_mid_output_is_an_error(server: LiveServer, stream: bool) -> None:
    """It was `finish_reason: stop`, a 200, with half an answer."""
    response = post(server, regex=LATE, max_tokens=200, stream=stream)
    if stream:
        assert response.status_code == 200
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events[:-1]).startswith(LEAD)
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        error = events[-1]["error"]
    else:
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
    assert (error["code"], error["type"]) == ("structured_output_failed", "server_error")
    assert "too complex" in error["message"]
    assert "failed in the middle of the answer" in server.log
    assert "Traceback" not in server.log
    assert post(server, regex="(yes|no)", max_tokens=8).json()["choices"][0]["text"] in ("yes", "no")


def test_streams_go_on_while_monsters_are_compiled(server: LiveServer) -> None:
    """Compiling 4,000 optional properties stopped every stream of the engine for seconds."""
    wanted = {"prompt": "The sea is", "max_tokens": 80, "temperature": 0, "stream": True}
    shaped = {**wanted, "regex": r"( [a-z]{1,12}){40}"}
    alone = [_text(server, wanted), _text(server, shaped)]
    with ThreadPoolExecutor(8) as pool, server.http as http:
        others = pool.submit(_text, server, shaped)
        with http.stream("POST", "/v1/completions", json=wanted) as response:
            pieces: list[str] = []
            meanwhile = 0
            monsters = []
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
                if len(pieces) == 5:
                    monsters = [pool.submit(post, server, max_tokens=40, **body) for body in MONSTERS]
                meanwhile += bool(monsters) and not monsters[0].done()
        assert "".join(pieces) == alone[0]
        assert others.result() == alone[1]
        wide, long, late, endless = (monster.result() for monster in monsters)
        assert meanwhile >= 10, "tokens while the wide schema was compiled"
    for refused in (wide, long, endless):
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "invalid_grammar"
    assert late.status_code in (200, 500)  # within 40 tokens it may or may not come to its limit
    assert wide.json()["error"]["param"] == "response_format"
    assert long.json()["error"]["param"] == "regex"


def _text(server: LiveServer, body: dict[str, object]) -> str:
    text = server.post("/v1/completions", **body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)
