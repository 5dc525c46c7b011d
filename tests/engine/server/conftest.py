"""Servers that the tests of this folder share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import ODD_NAMES, WARM_PROMPT, LiveServer, serving

from leadline.engine.hub import resolve_model


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """The demo model with a context of 512 tokens in blocks of 16, at most 8 choices."""
    with serving("smollm2", "--max-n=8") as live:
        yield live


@pytest.fixture(scope="session")
def small_server(small_model: Path) -> Iterator[LiveServer]:
    """The same of the small model, for what does not depend on the answers' text."""
    with serving(small_model, "--max-n=8", "--served-name=smollm2", "--tokenizer-info") as live:
        yield live


@pytest.fixture(scope="session")
def strict_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template that insists on alternating roles, and with the tags of tool calls
    among its special tokens."""
    folder = tmp_path_factory.mktemp("models") / "strict"
    folder.mkdir()
    source = resolve_model("smollm2", progress=False).path
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = (source / "tokenizer.json").read_text()
    for word, tag in (("<jupyter_start>", "<tool_call>"), ("<jupyter_text>", "</tool_call>")):
        words = words.replace(f'"{word}"', f'"{tag}"')
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(words)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}"
        "{% if loop.previtem and loop.previtem.role == message.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    return folder


@pytest.fixture(scope="session")
def narrow_server(strict_model: Path) -> Iterator[LiveServer]:
    """One request at a time, one more may wait; a strict chat template; an API key; served under its own
    name and odd aliases."""
    keys = strict_model.parent / "keys"
    keys.write_text("key-one\nkey-two\n")
    warm = strict_model.parent / "warm"
    warm.write_text(WARM_PROMPT + "\n")
    with serving(
        str(strict_model),
        "--served-name=strict",
        *(f"--alias={name}" for name in ODD_NAMES),
        "--max-concurrent-requests=1",
        "--max-queued-requests=1",
        f"--api-key-file={keys}",
        f"--warmup-file={warm}",
    ) as live:
        yield live
