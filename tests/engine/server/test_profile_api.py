"""`POST /admin/profile`: traces of a running engine, into one directory and one at a time."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "made" / "on demand"


@pytest.fixture(scope="module")
def profiled(folder: Path, small_model: Path) -> Iterator[LiveServer]:
    with serving(small_model, "--served-name=smollm2", f"--profile-dir={folder}") as live:
        yield live


def generate(server: LiveServer, tokens: int) -> None:
    answer = server.post(
        "/v1/completions", model="smollm2", prompt="One two", max_tokens=tokens, ignore_eos=True
    )
    assert answer.status_code == 200, answer.text


def names(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_a_trace_holds_the_steps_asked_for_with_their_phases(profiled: LiveServer, folder: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(profiled.post, "/admin/profile", steps=5)
        while not asked.done():
            generate(profiled, 8)
        answer = asked.result()
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["steps"] == 5
    assert body["seconds"] > 0
    path = Path(body["path"])
    assert path.parent == folder
    seen = names(path)
    for phase in ("schedule", "prepare", "forward", "sample", "wait", "postprocess"):
        assert seen.count(f"leadline.{phase}") == 5, phase
    assert any(name.startswith("aten::") for name in seen)


def test_a_second_profile_is_refused_until_the_first_is_done(profiled: LiveServer, folder: Path) -> None:
    before = len(list(folder.iterdir()))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Which of two orders the server hears first is open: ask until the long one was first.
        while True:
            long = pool.submit(profiled.post, "/admin/profile", seconds=3)
            short = profiled.post("/admin/profile", seconds=0.01)
            while short.status_code == 200 and not long.done():
                short = profiled.post("/admin/profile", seconds=0.01)
            if long.result().status_code == 200 and short.status_code == 409:
                break
    error = short.json()["error"]
    assert (error["code"], error["type"]) == ("profile_running", "invalid_request_error")
    assert len(list(folder.iterdir())) > before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "steps"),
        ({"steps": 1, "seconds": 1}, "steps"),
        ({"steps": 0}, "steps"),
        ({"steps": 1001}, "steps"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 61}, "seconds"),
        ({"seconds": 1, "path": "/etc/passwd"}, None),
    ],
)
def test_bad_orders_are_refused_by_field(profiled: LiveServer, folder: Path, body: dict, param: str) -> None:
    before = sorted(folder.parent.parent.rglob("*"))
    with profiled.http as http:
        answer = http.post("/admin/profile", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param or "path" in error["message"]
    assert sorted(folder.parent.parent.rglob("*")) == before


def test_profiling_is_off_unless_a_directory_is_configured(server: LiveServer) -> None:
    answer = server.post("/admin/profile", steps=1)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "profiling_off"
    assert "--profile-dir" in answer.json()["error"]["message"]
