"""A constraint provider for tests: each answer is a text that a script gives.

So any model can take part in a dialogue with tools. Its tokens are still its own choice among those that
spell the text.

A task names itself by `[task:NAME]` in a user's message, and LEADLINE_FORCED_ANSWERS/NAME.json lists its
answers. The conversation tells which is next: the number of tool results in it. So every pod, and every
attempt of a stream, gives the same one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.openai.chat import ChatCompletionRequest, ToolMessage, UserMessage

_TASK = re.compile(r"\[task:([\w-]+)\]")


class ForcedAnswers:
    """`constrain` forces the next answer of a conversation that names a task."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["LEADLINE_FORCED_ANSWERS"])

    def constrain(self, request: ChatCompletionRequest) -> StructuredSpec | None:
        spoken = [_text(message.content) for message in request.messages if isinstance(message, UserMessage)]
        found = _TASK.search("\n".join(spoken))
        if found is None:
            return None
        if not request.tools:  # a client that wants a title for the conversation, say
            return _forced("A task")
        script = json.loads((self._folder / f"{found[1]}.json").read_text())
        results = sum(isinstance(message, ToolMessage) for message in request.messages)
        return _forced(_written(script[min(results, len(script) - 1)]))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content)


def _written(answer: dict[str, Any]) -> str:
    """The answer in the form that the model would write: text, and a call in Hermes' markup."""
    text: str = answer.get("text", "")
    if call := answer.get("call"):
        text += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return text


def _forced(text: str) -> StructuredSpec:
    return StructuredSpec("lark", f"start: {json.dumps(text, ensure_ascii=False)}")
