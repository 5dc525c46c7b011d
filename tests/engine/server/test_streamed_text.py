"""What a stream may never show: the beginning of a stop string, half a character."""

from __future__ import annotations

import json

import pytest
from live_server import LiveServer

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ\n" * 4 + "ABC"


def pieces(server: LiveServer, **body: object) -> list[str]:
    stream = server.client.completions.create(
        model="smollm2",
        temperature=0,
        stream=True,
        extra_body={key: body.pop(key) for key in ("regex",) if key in body},
        **body,  # type: ignore[arg-type]
    )
    return [chunk.choices[0].text for chunk in stream]


def test_no_part_of_a_stop_string_is_streamed(server: LiveServer) -> None:
    """E1."""
    free = "".join(pieces(server, prompt=ALPHABET, max_tokens=12))
    assert free.startswith("DEFGHIJ"), free
    stopped = pieces(server, prompt=ALPHABET, max_tokens=12, stop=["FGHIJ"])
    assert "".join(stopped) == "DE"
    assert "".join(pieces(server, prompt=ALPHABET, max_tokens=12, stop=["DEFGHIJ"])) == ""


def test_text_that_only_began_like_a_stop_string_is_given_out(server: LiveServer) -> None:
    free = "".join(pieces(server, prompt=ALPHABET, max_tokens=12))
    held = "".join(pieces(server, prompt=ALPHABET, max_tokens=12, stop=[free[:5] + "@", free[-3:] + "@"]))
    assert held == free


def test_characters_of_several_tokens_arrive_whole(server: LiveServer) -> None:
    """E2."""
    text = "🙂🚀漢字"
    parts = pieces(server, prompt="Emoji: ", max_tokens=40, regex=text)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_character_cut_by_max_tokens_is_flushed_once(server: LiveServer) -> None:
    """E2: the emoji is several tokens long, and only its first is generated."""
    assert len(server.post("/tokenize", prompt="🚀").json()["tokens"]) > 1
    assert "".join(pieces(server, prompt="Emoji: ", max_tokens=1, regex="🚀")) == "\ufffd"


def test_each_token_is_sent_when_it_is_there(server: LiveServer) -> None:
    events = []
    with (
        server.http as http,
        http.stream(
            "POST",
            "/v1/completions",
            json={
                "prompt": "One two three",
                "stream": True,
                "max_tokens": 6,
                "ignore_eos": True,
                "temperature": 0,
            },
        ) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        for chunk in response.iter_raw():
            events.append(chunk)
    assert len(events) >= 6
    lines = b"".join(events).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-2])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_streams_have_a_finish_reason(server: LiveServer, max_tokens: int) -> None:
    stream = server.client.completions.create(
        model="smollm2", prompt="One two", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
