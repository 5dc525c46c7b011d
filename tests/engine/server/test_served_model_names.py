"""What requests may call the model: the served name and any number of aliases, as strings (P17)."""

from __future__ import annotations

import argparse
from urllib.parse import quote

import pytest
from live_server import ODD_NAMES, LiveServer

from leadline.cli import serve

KEY = {"Authorization": "Bearer key-one"}


def test_the_model_list_has_the_served_name_first_and_then_the_aliases(narrow_server: LiveServer) -> None:
    with narrow_server.http as http:
        cards = http.get("/v1/models", headers=KEY).json()["data"]
    assert [card["id"] for card in cards] == ["strict", *ODD_NAMES]
    assert len({str({**card, "id": ""}) for card in cards}) == 1  # one model: equal but for the name


@pytest.mark.parametrize("name", ["strict", *ODD_NAMES])
def test_every_name_reaches_the_model(narrow_server: LiveServer, name: str) -> None:
    with narrow_server.http as http:
        card = http.get(f"/v1/models/{quote(name, safe='')}", headers=KEY)
        assert card.json()["id"] == name
        body = {"model": name, "max_tokens": 1, "temperature": 0}
        chat = {**body, "messages": [{"role": "user", "content": "Hi"}]}
        for path, asked in (
            ("/v1/completions", {**body, "prompt": "Hi"}),
            ("/v1/chat/completions", chat),
            ("/tokenize", {"model": name, "prompt": "Hi"}),
            ("/detokenize", {"model": name, "tokens": [5]}),
        ):
            answer = http.post(path, json=asked, headers=KEY)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["STRICT", "qwen/qwen3-8b.instruct", "x" * 63, "模型", "", "strict "])
def test_names_are_not_folded_cut_or_trimmed(narrow_server: LiveServer, name: str) -> None:
    with narrow_server.http as http:
        answer = http.post("/v1/completions", json={"model": name, "prompt": "Hi"}, headers=KEY)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'strict', 'Qwen/Qwen3-8B.Instruct'" in error["message"]


def test_aliases_come_from_options_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    monkeypatch.setenv("LEADLINE_ALIASES", "a/B.c, 模型,")
    assert serve.aliases(parser.parse_args(["smollm2"])) == ("a/B.c", "模型")
    assert serve.aliases(parser.parse_args(["smollm2", "--alias=x,y", "--alias=z"])) == ("x,y", "z")
