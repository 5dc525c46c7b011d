"""Chat messages as callers send them → as a model's template takes them.

Owns the checks on messages that need no model (E4: an empty list is the caller's mistake) and the
translations that a template needs (`template_shape.TemplateShape`): content parts, null contents, arguments
of calls as objects or text, ids of calls, `developer` to `system`, `function` and `function_call`, which are
older, to `tool` and `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from leadline.protocol.errors import RequestError
from leadline.protocol.text.template_shape import PLAIN, TemplateShape

__all__ = ["normalize_messages"]

_CALL_ID = "function0"
"""Of calls and answers in the older form, which has none; Mistral's templates want nine characters."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], shape: TemplateShape = PLAIN, *, developer_known: bool = False
) -> list[dict[str, Any]]:
    """Fresh dicts in the forms of `shape`. Keys that are None are left out, but for the content.

    `developer_known`: the template itself knows the role `developer`; otherwise it becomes `system`, its
    older name. Raises RequestError naming the message.
    """
    if type(messages) is not list and (not isinstance(messages, Sequence) or isinstance(messages, str)):
        raise RequestError("messages must be a list", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    plain = [
        _normalize(message, f"messages[{i}]", shape, developer_known) for i, message in enumerate(messages)
    ]
    if shape.tool_names:
        _name_tools(plain)
    if shape.short_ids:
        _shorten_ids(plain)
    if not shape.late_system:
        plain = _without_late_system(plain)
    return _split(plain, shape) if shape.splits_calls else plain


def _normalize(
    message: Mapping[str, Any], where: str, shape: TemplateShape, developer_known: bool
) -> dict[str, Any]:
    # Asking for the exact type first spares most messages the abstract class, which takes a microsecond.
    if type(message) is not dict and not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role")
    if role == "developer":
        role = "system"  # also to a template that knows both
        if not developer_known:
            plain["role"] = role
    if role == "function":
        role = plain["role"] = "tool"
        plain.setdefault("tool_call_id", _CALL_ID)
        plain.setdefault("content", "")
    if "function_call" in plain:
        call = plain.pop("function_call")
        plain.setdefault("tool_calls", [{"id": _CALL_ID, "type": "function", "function": call}])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls", shape)
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    if role == "assistant" and ("reasoning" in plain or "reasoning_content" in plain):
        _name_thought(plain, shape)
    content = plain.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is required for the role {role!r}", param=f"{where}.content")
    if type(content) is not str or role in shape.only_parts or not content:
        content = _content(content, f"{where}.content", role, "tool_calls" in plain, shape)
    plain["content"] = content
    return plain


def _name_thought(message: dict[str, Any], shape: TemplateShape) -> None:
    """Put the thought of an earlier turn under each name that a template may read it by."""
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    message["reasoning_content"] = message["reasoning"] = thought
    # gpt-oss takes a thought or a text beside calls, not both.
    if shape.thinking and not (message.get("tool_calls") and message.get("content")):
        message["thinking"] = thought


def _content(content: Any, where: str, role: str, calls: bool, shape: TemplateShape) -> Any:
    if isinstance(content, str):
        texts = [content] if content else []
    elif content is None:
        texts = []
    else:
        texts = _texts(content, where)
    if not any(texts) and calls:
        # Null as it came, unless only an empty text shows the calls; and the other way round.
        null = shape.calls_with_null if content is None else not shape.calls_with_empty
        return None if null and shape.calls_with_null else ""
    if texts and (role in shape.only_parts or (role in shape.parts and not isinstance(content, str))):
        return [{"type": "text", "text": text} for text in texts]
    return shape.joint.join(texts)


def _texts(content: Any, where: str) -> list[str]:
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
    return texts


def _tool_calls(calls: Any, where: str, shape: TemplateShape) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} must be a list", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}] must be an object with function.name", param=f"{where}[{i}]")
        arguments = _arguments(function.get("arguments", {}), shape)
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(arguments: Any, shape: TemplateShape) -> Any:
    """Arguments travel as JSON text in the OpenAI API. A model may have written some that are no JSON, or
    were cut: they stay the text that they are, since a later turn cannot mend them."""
    if shape.text_arguments:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            value = arguments
        if isinstance(value, str):
            value = arguments
    return value if isinstance(value, Mapping) or shape.any_arguments else {"arguments": arguments}


def _name_tools(messages: list[dict[str, Any]]) -> None:
    """Give messages of tools the name of the function whose call they answer."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] == "tool":
            message.setdefault("name", names.get(str(message.get("tool_call_id")), "tool"))


def _shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Give calls and their answers ids of nine letters and digits: another id's are a hash of it."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = _short_id(call.get("id"))
        if message["role"] == "tool":
            message["tool_call_id"] = _short_id(message.get("tool_call_id"))


def _short_id(call_id: object) -> str:
    text = str(call_id)
    if len(text) == len(_CALL_ID) and text.isascii() and text.isalnum():
        return text
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()[: len(_CALL_ID)]


def _without_late_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages behind others become text of the user's message in front of them or behind them, or a
    user's message of their own."""
    result: list[dict[str, Any]] = []
    contents: list[list[Any]] = []
    """Of each message in `result`."""
    begun = joins = False
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        late, begun = is_system and begun, begun or not is_system
        if late:
            message = {"role": "user", "content": message["content"]}
        if (late or joins) and message["role"] == result[-1]["role"] == "user":
            contents[-1].append(message["content"])
        else:
            result.append(message)
            contents.append([message["content"]])
        joins = late  # the next message of the user as well
    for message, several in zip(result, contents, strict=True):
        if len(several) > 1:
            message["content"] = _joined(several)
    return result


def _joined(contents: list[Any]) -> Any:
    """Contents of several messages as one."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _split(messages: list[dict[str, Any]], shape: TemplateShape) -> list[dict[str, Any]]:
    """Texts beside calls become messages in front of them."""
    result = []
    for message in messages:
        if "tool_calls" in message and message["content"]:
            result.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {
                "role": message["role"],
                "content": None if shape.calls_with_null else "",
                "tool_calls": message["tool_calls"],
            }
        result.append(message)
    return result
