"""Two real engines, a real Valkey and the gateway, as `leadline up` runs them; their parts get killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from running_up import Up, kill, left, says, until

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    stack = Up(tmp_path_factory.mktemp("up"), "--replicas=2")
    try:
        stack.wait_ready()
        until(lambda: stack.ask(says("Hello", 1)).exact, what="routing by tokens")
        yield stack
    finally:
        stack.clean_up()


def test_the_openai_client_streams_through_the_gateway(up: Up) -> None:
    with OpenAI(base_url=f"{up.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == ["smollm2"]
        response = client.chat.completions.with_raw_response.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in response.parse()]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) >= 4
    assert response.headers["x-leadline-pod"] in ("engine-0", "engine-1")


def test_a_conversation_stays_with_the_engine_that_holds_it(up: Up) -> None:
    for word in ("river", "stone", "window"):
        messages = says(word)
        first = up.ask(messages)
        assert first.exact
        assert first.cached_tokens < 64  # of the template at most
        again = up.ask(messages)
        messages = [
            *messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = up.ask(messages)
        assert again.pod == second.pod == first.pod
        for turn in (again, second):
            assert turn.cached_tokens >= first.prompt_tokens - 16
            assert turn.matched()[first.pod] == turn.cached_tokens  # predicted as it was (P21)


def test_a_killed_engine_is_done_without_and_comes_back_with_nothing(up: Up) -> None:
    messages = says("copper")
    pod = up.ask(messages).pod
    assert up.ask(messages).matched()[pod] > 200
    lives = len(up.lives(pod))
    kill(up.pid(pod))
    other = up.ask(messages)  # P7, P19: while the gateway still believes in it
    assert other.pod != pod
    words = iter(f"garden{number}" for number in range(1000))
    until(lambda: up.ask(says(next(words), 20)) and len(up.lives(pod)) > lives, 60, "a restart")
    assert f"{pod} ended (killed by SIGKILL)" in up.log
    # It may be picked again once its circuit has closed; until then nothing is known about it.
    until(lambda: pod in up.ask(says(next(words), 20)).matched(), 60, "a return")
    back = up.ask(messages)
    # It may have answered one of those, which begin with the template's own words, a block of 16, as all do.
    assert back.matched()[pod] <= 16
    assert back.pod == other.pod
    assert back.cached_tokens > 200


def test_a_stream_goes_on_elsewhere_when_its_engine_is_killed(up: Up) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me a long story of a ship."}],
        "max_tokens": 120,
        "temperature": 0,
        "ignore_eos": True,
    }
    undisturbed = up.ask(body["messages"], max_tokens=120, ignore_eos=True).text  # type: ignore[arg-type]
    with OpenAI(base_url=f"{up.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        response = client.chat.completions.with_raw_response.create(
            **{name: value for name, value in body.items() if name != "ignore_eos"},  # type: ignore[call-overload]
            extra_body={"ignore_eos": True},
            stream=True,
        )
        pod = response.headers["x-leadline-pod"]
        lives = len(up.lives(pod))
        pieces = []
        for chunk in response.parse():
            pieces.append(chunk.choices[0].delta.content or "")
            if len(pieces) == 8:
                kill(up.pid(pod))
    assert "".join(pieces) == undisturbed
    metrics = httpx.get(f"{up.url}/metrics").text
    assert 'leadline_gateway_migrations_total{outcome="moved",service="local/leadline"} 1.0' in metrics
    until(lambda: len(up.lives(pod)) > lives, 60, "a restart")


def test_an_engine_that_hangs_is_done_without(up: Up) -> None:
    messages = says("silver")
    pod = up.ask(messages).pod
    family = [process for process in up.processes() if process.pid == up.pid(pod)]
    family += family[0].children()
    for process in family:
        process.suspend()
    try:
        other = up.ask(messages)
        assert other.pod != pod
        assert up.ask(messages).pod == other.pod
    finally:
        for process in family:
            process.resume()
    words = iter(f"yellow{number}" for number in range(1000))
    until(lambda: pod in up.ask(says(next(words), 20)).matched(), 60, "a return")
    # The same life: what it held it holds.
    assert up.ask(messages).matched()[pod] > 200


def test_requests_go_on_without_valkey_and_events_come_back_with_it(up: Up) -> None:
    messages = says("signal")
    pod = up.ask(messages).pod
    lives = len(up.lives("valkey"))
    os.kill(up.pid("valkey"), signal.SIGSTOP)
    assert up.ask(messages).pod == pod  # P15: slow, then down, then empty
    kill(up.pid("valkey"))
    assert up.ask(messages).pod == pod
    assert up.ask(says("mountain")).text
    until(lambda: len(up.lives("valkey")) > lives, 30, "a restart")
    address = up.lives("engine-1")[-1][1]
    words = iter(f"paper{number}" for number in range(1000))

    def gateway_hears() -> bool:
        """Of a prompt that did not come by way of it, which only events can tell."""
        prompt = says(next(words), 40)
        up.ask(prompt, url=f"http://{address}")
        return up.ask(prompt).matched().get("engine-1", 0) > 0

    until(gateway_hears, 60, "an event")


def test_stopping_finishes_streams_and_leaves_no_process(up: Up) -> None:
    processes = up.processes()
    assert len(processes) >= 1 + 1 + 2 * 2 + 1  # up, valkey, engines with their cores, gateway
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
    }
    lines: list[str] = []
    began = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                began.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(60)
    assert up.end(signal.SIGTERM) == 0
    reader.join(30)
    assert "data: [DONE]" in lines
    assert left(processes) == []
    assert up.log.splitlines()[-1] == "stopped"


def test_nothing_outlives_a_killed_launcher(tmp_path: Path, small_model: Path) -> None:
    stack = Up(tmp_path, "--replicas=1", "--workers=2", model=str(small_model))
    try:
        stack.wait_ready()
        processes = stack.processes()
        assert len(processes) >= 1 + 1 + 2 + 3  # up, valkey, engine and core, gateway and two workers
        stack.end(signal.SIGKILL)
        until(lambda: left(processes) == [], 30, "the end of all processes")
    finally:
        stack.clean_up()


def test_a_start_can_be_interrupted(tmp_path: Path, small_model: Path) -> None:
    stack = Up(tmp_path, "--replicas=2", model=str(small_model))
    try:
        until(lambda: "engine-1: " in stack.log, 60, "a beginning")
        processes = stack.processes()
        assert stack.end(signal.SIGINT) == 0
        assert stack.url == ""
        assert left(processes) == []
    finally:
        stack.clean_up()
