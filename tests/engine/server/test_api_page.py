"""The examples of docs/api.md, run as they stand against a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

DOCS = Path(__file__).parents[3] / "docs"


def printed_by(page: str, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What each example of a page prints."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    printed = []
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000", server.url), names)
        printed.append(capsys.readouterr().out.strip())
    names["client"].close()
    return printed


def test_the_examples_of_the_page_run(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("api.md", server, capsys)
    chat, streamed, tool, refused = printed
    assert re.search(r"\S.* (stop|length) CompletionUsage\(", chat, re.DOTALL)
    assert re.search(r"\S.*CompletionUsage\(completion_tokens=\d+", streamed, re.DOTALL)
    name, arguments = tool.split(" ", 1)
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert refused.startswith(
        "400 context_length_exceeded messages Error code: 400 - This model's maximum context length is "
    )


def test_the_examples_of_the_page_of_responses_run(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, streamed = printed_by("responses.md", server, capsys)
    assert re.search(r"\S.* (completed|incomplete) ResponseUsage\(", whole, re.DOTALL)
    assert re.search(r"\S.*ResponseUsage\(", streamed, re.DOTALL)
