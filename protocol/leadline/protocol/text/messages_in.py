"""Chat messages as callers send them → as templates expect them.

Owns the checks on messages that need no model (E4: an empty list is the caller's mistake) and the small
translations that templates need: content parts to text, tool-call arguments from JSON text to objects,
`developer` to `system`, `function` and `function_call`, which are older, to `tool` and `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.protocol.errors import RequestError

__all__ = ["normalize_messages"]

_CALL_ID = "function0"
"""Of calls and answers in the older form, which has none; Mistral's templates want nine characters."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], *, developer_known: bool = False
) -> list[dict[str, Any]]:
    """Fresh dicts whose `role` and `content` are text. Keys that are None are left out.

    Content parts are joined by newlines. `developer_known`: the template itself knows the role `developer`;
    otherwise it becomes `system`, its older name. Raises RequestError naming the message.
    """
    if type(messages) is not list and (not isinstance(messages, Sequence) or isinstance(messages, str)):
        raise RequestError("messages must be a list", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_normalize(message, f"messages[{i}]", developer_known) for i, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str, developer_known: bool) -> dict[str, Any]:
    # Asking for the exact type first spares most messages the abstract class, which takes a microsecond.
    if type(message) is not dict and not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role")
    if role == "developer" and not developer_known:
        plain["role"] = "system"
    if role == "function":
        role = plain["role"] = "tool"
        plain.setdefault("tool_call_id", _CALL_ID)
        plain.setdefault("content", "")
    if "function_call" in plain:
        call = plain.pop("function_call")
        plain.setdefault("tool_calls", [{"id": _CALL_ID, "type": "function", "function": call}])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    content = plain.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is required for the role {role!r}", param=f"{where}.content")
    plain["content"] = _text(content, f"{where}.content")
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of content parts", param=where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise RequestError(
                f"{where}[{i}] has type {kind!r}, but this model takes text only: use "
                '{"type": "text", "text": "..."}',
                param=f"{where}[{i}]",
            )
        if not isinstance(part.get(field), str):
            raise RequestError(f"{where}[{i}].{field} must be a string", param=f"{where}[{i}].{field}")
        texts.append(part[field])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Arguments travel as JSON text in the OpenAI API; templates apply `tojson` to an object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} must be a list", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] must be an object with function.name", param=f"{where}[{i}]")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"{where}[{i}].function.arguments is not valid JSON: {error}",
                    param=f"{where}[{i}].function.arguments",
                ) from error
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result
