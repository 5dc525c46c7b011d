"""What a chat template takes messages for: found out by rendering a few, once, when it is loaded.

Templates agree on `role` and on text in `content`, and on little else. A call of a tool may be written only
where `content` is null, or only where it is text; its arguments may be wanted as an object, which is written
as JSON, or as text, which is put in as it is; content parts may be walked through, or not be known. What does
not fit is seldom an error: the call is just not there, or Python's own notation is. So each form is rendered
with words that are easily found again, and the first that shows them is the one that requests are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["PLAIN", "TemplateShape", "find_shape"]

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str | None]
"""Messages, and whether with a tool → text; None where the template fails."""


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The forms of messages that a template takes."""

    parts: frozenset[str] = field(default_factory=frozenset)
    """Roles whose content may be a list of parts."""
    only_parts: frozenset[str] = field(default_factory=frozenset)
    """Roles whose content must be one."""
    joint: str = "\n"
    """Joins the parts of other roles: what the template puts between parts where it takes them."""
    calls_with_null: bool = False
    calls_with_empty: bool = True
    """Calls are shown beside a content that is null, or empty."""
    splits_calls: bool = False
    """They are shown only without a text beside them: that one becomes a message before."""
    text_arguments: bool = False
    """Arguments of calls are wanted as JSON text; otherwise as the object."""
    any_arguments: bool = True
    """Wanted as the object, but a text or another value is taken too."""
    tool_names: bool = False
    """A tool's message must have the tool's name."""
    late_system: bool = True
    """A system message behind other messages is shown where it stands."""
    short_ids: bool = False
    """Ids of calls must have nine letters and digits, as in Mistral's templates."""
    thinking: bool = False
    """The thought of an earlier turn is read from `thinking`, as by gpt-oss's template."""


PLAIN = TemplateShape()

_KEY, _VALUE, _RESULT, _TEXT = "leadkey", "leadvalue", "leadresult", "leadtext"
_TOOL = "lead_tool"
_ARGUMENTS = {_KEY: _VALUE}
_ARGUMENTS_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
_CALL_ID = "leadcall1"  # nine letters and digits, which some templates insist on
_OTHER_IDS = ("c1", "call_0123456789abcdef01234567")


def find_shape(render: Render, source: str) -> TemplateShape:
    """`source`: the template, for words that it writes itself."""
    shape = _with_late_system(_with_parts(_with_calls(PLAIN, render, source), render), render)
    return replace(shape, thinking=".thinking" in source)


def _with_late_system(shape: TemplateShape, render: Render) -> TemplateShape:
    def message(role: str, word: str) -> Message:
        text = _TEXT + word
        return {"role": role, "content": [_part(word)] if role in shape.only_parts else text}

    question, late = message("user", "question"), message("system", "late")
    talks = [[question, late], [question, message("assistant", "answer"), late, question]]
    texts = [render(talk, False) for talk in talks]
    return replace(shape, late_system=all(text is not None and f"{_TEXT}late" in text for text in texts))


def _with_calls(shape: TemplateShape, render: Render, source: str) -> TemplateShape:
    def shown(content: str | None, shape: TemplateShape, *also: str) -> bool:
        text = render(_call(content, shape), True)
        return (
            text is not None
            and all(word in text for word in (_KEY, _VALUE, *also))
            and f"'{_KEY}'" not in text  # Python's notation
            and f'\\"{_KEY}' not in text  # JSON in JSON
            and (content is not None or "None" in source or "None" not in text)
        )

    forms = [
        replace(shape, text_arguments=as_text, tool_names=named)
        for named in (False, True)
        for as_text in (False, True)
    ]
    for form in forms:
        null, empty = shown(None, form), shown("", form)
        if null or empty:
            form = replace(form, calls_with_null=null, calls_with_empty=empty)
            break
    else:
        # Not shown at all. Arguments are then in the form that at least renders.
        form = next((form for form in forms if render(_call("", form), True) is not None), shape)
    if not form.text_arguments:
        form = replace(form, any_arguments=render(_call("", form, "no JSON"), True) is not None)
        if form.calls_with_null and not form.calls_with_empty:
            form = replace(form, any_arguments=render(_call(None, form, "no JSON"), True) is not None)
    if (form.calls_with_null or form.calls_with_empty) and not shown(_TEXT, form, _TEXT):
        form = replace(form, splits_calls=shown(_TEXT, replace(form, splits_calls=True), _TEXT))
    content = "" if form.calls_with_empty else None
    if render(_call(content, form), True) is not None:
        other_ids = (render(_call(content, form, call_id=call_id), True) for call_id in _OTHER_IDS)
        form = replace(form, short_ids=any(text is None for text in other_ids))
    return form


def _call(
    content: str | None, shape: TemplateShape, arguments: str | None = None, call_id: str = _CALL_ID
) -> list[Message]:
    given: Any = _ARGUMENTS_TEXT if shape.text_arguments else _ARGUMENTS
    function = {"name": _TOOL, "arguments": given if arguments is None else arguments}
    call = {"id": call_id, "type": "function", "function": function}
    before: list[Message] = []
    if content and shape.splits_calls:
        before = [{"role": "assistant", "content": content}]
        content = None if shape.calls_with_null else ""
    return [
        {"role": "user", "content": "question"},
        *before,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        _tool_message(shape, _RESULT, call_id),
    ]


def _tool_message(shape: TemplateShape, content: Any, call_id: str = _CALL_ID) -> Message:
    named = {"name": _TOOL} if shape.tool_names else {}
    return {"role": "tool", "tool_call_id": call_id, "content": content, **named}


def _with_parts(shape: TemplateShape, render: Render) -> TemplateShape:
    parts, only_parts, joint = set(), set(), shape.joint
    for role in ("user", "system", "assistant", "tool"):
        text = _shown_of(role, shape, render, [_part("one"), _part("two")])
        # Its own words, in Python's notation or JSON's, show that a list was written out as such.
        if text is None or "'type'" in text or '"type": "text"' in text or '"type":"text"' in text:
            continue
        _, _, rest = text.partition(f"{_TEXT}one")
        between, second, _ = rest.partition(f"{_TEXT}two")
        if not second:
            continue
        parts.add(role)
        if len(parts) == 1:
            joint = between
        if _shown_of(role, shape, render, f"{_TEXT}one") is None:
            only_parts.add(role)
    return replace(shape, parts=frozenset(parts), only_parts=frozenset(only_parts), joint=joint)


def _part(word: str) -> dict[str, str]:
    return {"type": "text", "text": _TEXT + word}


def _shown_of(role: str, shape: TemplateShape, render: Render, content: Any) -> str | None:
    """A conversation in which all messages of a role have this content, if all of it is shown, each time."""
    if role == "tool":
        call = _call("" if shape.calls_with_empty else None, shape)
        talks = [[*call[:-1], _tool_message(shape, content)]]
    else:
        turns: list[Message] = [
            {"role": name, "content": content if role == name else "other"}
            for name in ("system", "user", "assistant", "user")
        ]
        talks = [turns, turns[1:]] if role != "system" else [turns, turns[:1] + turns[3:]]
    for talk in talks:
        text = render(talk, role == "tool")
        if text is not None:
            times = sum(message["role"] == role for message in talk)
            words = [part["text"] for part in content] if isinstance(content, list) else [content]
            return text if all(text.count(word) >= times for word in words) else None
    return None
