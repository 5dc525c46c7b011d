"""A model with fill-in-the-middle tokens, and with a form of tool calls that is not known, at an engine and
through a gateway."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from engines import BLOCK, engines
from gateway_rig import gateway_to, until

from leadline.gateway.tokens.service import TokenService
from leadline.protocol.text.infill import infill_ids
from leadline.protocol.text.tokenizer import Tokenizer

RENAMED = {
    "<filename>": "<fim_prefix>",
    "<gh_stars>": "<fim_suffix>",
    "<issue_start>": "<fim_middle>",
}
"""Special tokens of the demo model, and what they are called here."""


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("infill") / "model"
    shutil.copytree(small_model, copy)
    for file in copy.glob("*.json"):
        text = file.read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        file.write_text(text)
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "chat_template.jinja").write_text(
        "<functions>{{ tools }}</functions>{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return copy


async def test_both_build_the_same_prompt_and_refuse_unknown_calls(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    before, after = "def add(a, b):\n    return " * 6, "\n\nprint(add(1, 2))"
    expected = infill_ids(before, after, tokenizer, special=True)
    body = {"model": "m", "prompt": before, "suffix": after, "max_tokens": 2, "return_token_ids": True}
    exact = {"tokenizer": "auto", "model": str(folder), "block_size": BLOCK}
    with engines(1, model=str(folder)) as (engine,):
        async with gateway_to(engine.address, service=exact) as rig, httpx.AsyncClient(timeout=60) as client:
            service = rig.gateway.table.get("default/m")
            assert service is not None
            await until(lambda: isinstance(service.tokens, TokenService), 60)
            for url in (engine.url, rig.url):
                got = await client.post(f"{url}/v1/completions", json=body)
                assert got.json()["choices"][0]["prompt_token_ids"] == expected
            explained = await client.post(
                f"{rig.url}/v1/completions", json=body, headers={"X-Leadline-Explain": "1"}
            )
            tool = {"type": "function", "function": {"name": "f"}}
            chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
            for url in (engine.url, rig.url):
                refused = await client.post(f"{url}/v1/chat/completions", json=chat)
                error = refused.json()["error"]
                assert (refused.status_code, error["param"], error["code"]) == (
                    *(400, "tools"),
                    "unknown_tool_format",
                )
            said = explained.headers["x-leadline-explain"]
            assert f'"prompt_tokens":{len(expected)}' in said.replace(" ", "")
            await rig.settled()
