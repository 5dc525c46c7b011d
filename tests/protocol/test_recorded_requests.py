"""Requests that real agents sent in the middle of a task, with texts of our own: each is the chat it means.

tests/clients has the agents themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.protocol.anthropic.request import MessagesRequest
from leadline.protocol.openai import ChatCompletionRequest, decode_body
from leadline.protocol.responses import ResponsesRequest
from recorded_tools import loaded

FOLDER = Path(__file__).parent / "recorded_requests"
TURN = ["assistant", "tool", "assistant", "tool"]


def recorded(agent: str) -> tuple[str, dict[str, Any]]:
    """The path of a request, and its body with all the agent's tools in the form of that path."""
    found = json.loads((FOLDER / f"{agent}.json").read_text())
    functions = [
        {"name": tool["name"], "strict": tool["strict"], "schema": tool["schema"]} for tool in loaded()[agent]
    ]
    match found["path"]:
        case "/v1/messages":
            tools = [{"name": tool["name"], "input_schema": tool["schema"]} for tool in functions]
        case "/v1/responses":
            tools = [
                {
                    "type": "function",
                    "name": tool["name"],
                    "strict": tool["strict"],
                    "parameters": tool["schema"],
                }
                for tool in functions
            ]
        case _:
            tools = [
                {"type": "function", "function": {"name": tool["name"], "parameters": tool["schema"]}}
                for tool in functions
            ]
    return found["path"], {**found["body"], "tools": [*tools, *found["skipped_tools"]]}


@pytest.mark.parametrize(
    ("agent", "opening", "skipped"),
    [
        ("codex", ["system", "user", "user"], ["tools[7] namespace.multi_agent_v1", "tools[8] web_search"]),
        ("claude_code", ["system", "user", "system"], []),
        ("opencode", ["system", "user"], []),
    ],
)
def test_a_recorded_request_becomes_the_chat_that_it_means(
    agent: str, opening: list[str], skipped: list[str]
) -> None:
    path, body = recorded(agent)
    kinds = {"/v1/messages": MessagesRequest, "/v1/responses": ResponsesRequest}
    read = decode_body(json.dumps(body).encode(), kinds.get(path, ChatCompletionRequest))
    chat = read if isinstance(read, ChatCompletionRequest) else read.chat()
    assert [message.__struct_config__.tag for message in chat.messages] == opening + TURN
    assert [tool.function.name for tool in chat.tools or ()] == [tool["name"] for tool in loaded()[agent]]
    assert list(chat.skipped) == skipped
    assert chat.stream


def test_a_header_in_the_system_prompt_of_claude_code_is_left_out() -> None:
    _, body = recorded("claude_code")
    (system, *_) = decode_body(json.dumps(body).encode(), MessagesRequest).chat().messages
    assert "billing" not in str(system)
    assert "A long text" in str(system)
