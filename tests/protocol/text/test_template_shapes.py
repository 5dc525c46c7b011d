"""Messages reach a template in the forms that it takes: found out at load, then as transformers renders."""

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from leadline.protocol.errors import RequestError
from leadline.protocol.text.chat import ChatRenderer

# Each in the structure of a family in use, written for these tests.
NULL_FOR_CALLS = """{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<U>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}
{{- '<CALL>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '</CALL>' }}
{%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<A>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{- '<OUT>' + message['content'] }}{%- endif %}
{%- endfor %}{{- '<A>' }}"""
TEXT_ARGUMENTS = """{%- for message in messages %}
{%- if message['role'] == 'tool' %}{{- '<OUT ' + message['name'] + '>' + message['content'] + '\\n' }}
{%- else %}{{- '<' + message['role'] + '>' }}
{%- if message['content'] is not none %}{{- message['content'] }}{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '<function=' + call['function']['name'] + '>' + call['function']['arguments'] + '</function>' }}
{%- endfor %}{{- '\\n' }}{%- endif %}
{%- endfor %}"""
OBJECT_AS_JSON = """{%- for message in messages %}
{{- '<' + message.role + '>' }}{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<call>{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}' }}
{%- endfor %}{%- endfor %}"""
OBJECT_BY_KEYS = """{%- for message in messages %}
{{- '<' + message.role + '>' }}{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>{%- endfor %}
{%- endfor %}{%- endfor %}"""
EITHER_ARGUMENTS = """{%- for message in messages %}
{{- '<' + message.role + '>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{%- endfor %}{%- endfor %}"""
PARTS_OR_TEXT = """{%- for message in messages %}
{{- '<' + message['role'] + '>' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
{%- endfor %}{%- endif %}{%- endfor %}"""
ONLY_PARTS = """{%- for message in messages %}
{{- '<' + message['role'] + '>' }}
{%- for part in message['content'] if part['type'] == 'text' %}{{- part['text'] + ' ' }}{%- endfor %}
{%- endfor %}"""
PARTS_OF_USERS = """{%- if messages[0].role == 'system' %}{{- '<system>' + messages[0].content }}{%- endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<' + message.role + '>' }}
{%- if message.role == 'user' and message.content is not string %}
{%- for part in message.content %}{{- part.text }}{%- endfor %}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}"""
TEXT = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"

ARGUMENTS = '{"city": "Zürich", "days": 3}'


def talk(content=None, arguments=ARGUMENTS):
    call = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "content": "yes"},
    ]


def ours(source, messages):
    return ChatRenderer({"default": source}, {}).render(messages, add_generation_prompt=False)


def theirs(source, messages):
    rendered, _ = render_jinja_template([messages], chat_template=source)
    return rendered[0]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_template_that_writes_calls_only_beside_null_is_given_null(content):
    expected = "<U>Rain?<CALL>weather\n" + ARGUMENTS + "</CALL><OUT>yes<A>"
    assert ours(NULL_FOR_CALLS, talk(content)) == expected == theirs(NULL_FOR_CALLS, talk())


def test_a_text_beside_calls_that_the_template_would_drop_becomes_a_message_before():
    expected = "<U>Rain?<A>I look.<CALL>weather\n" + ARGUMENTS + "</CALL><OUT>yes<A>"
    assert ours(NULL_FOR_CALLS, talk("I look.")) == expected
    assert "<assistant>I look.<call>" in ours(OBJECT_AS_JSON, talk("I look."))


@pytest.mark.parametrize("content", [None, ""])
def test_a_template_that_adds_arguments_to_text_is_given_text(content):
    messages = talk(content)
    text = ours(TEXT_ARGUMENTS, messages)
    assert text == (
        "<user>Rain?\n<assistant><function=weather>" + ARGUMENTS + "</function>\n<OUT weather>yes\n"
    )
    messages[2]["name"] = "weather"
    assert text == theirs(TEXT_ARGUMENTS, messages)


def test_arguments_that_are_an_object_become_text_where_text_is_wanted():
    assert ours(NULL_FOR_CALLS, talk(None, json.loads(ARGUMENTS))) == ours(NULL_FOR_CALLS, talk())


@pytest.mark.parametrize("source", [OBJECT_AS_JSON, OBJECT_BY_KEYS, EITHER_ARGUMENTS])
def test_a_template_that_writes_out_objects_is_given_one(source):
    assert ours(source, talk("")) == theirs(source, talk("", json.loads(ARGUMENTS)))
    assert ours(source, talk("")) == ours(source, talk(None))


@pytest.mark.parametrize(
    "arguments", ['{"city": "Zür', "Zürich", "[1, 2", "", "5", '"x"', "[1]", "{" * 10_000]
)
@pytest.mark.parametrize(
    "source", [NULL_FOR_CALLS, TEXT_ARGUMENTS, OBJECT_AS_JSON, OBJECT_BY_KEYS, EITHER_ARGUMENTS]
)
def test_arguments_that_are_no_object_do_not_end_the_conversation(source, arguments):
    text = ours(source, talk(None, arguments))
    assert json.dumps(arguments, ensure_ascii=False)[1:-1] in text or arguments in text
    assert "yes" in text


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("source", [PARTS_OR_TEXT, ONLY_PARTS])
def test_a_template_that_walks_through_parts_is_given_them(source):
    messages = [
        {"role": "system", "content": parts("Be", "brief")},
        {"role": "user", "content": parts("a", "b", "c")},
        {"role": "assistant", "content": parts("d")},
    ]
    assert ours(source, messages) == theirs(source, messages)


def test_a_template_that_knows_only_parts_is_given_texts_as_one():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert ours(ONLY_PARTS, messages) == "<user>Hi <assistant>Yes "
    chat = ChatRenderer({"default": ONLY_PARTS}, {})
    continued = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<user>Hi <assistant>Yes"


def test_other_roles_parts_are_joined_as_the_template_joins_those_it_takes():
    messages = [
        {"role": "system", "content": parts("Be", "brief")},
        {"role": "user", "content": parts("a", "b")},
    ]
    assert ours(PARTS_OF_USERS, messages) == "<system>Bebrief<user>ab"


def test_parts_are_joined_by_newlines_where_the_template_knows_none():
    assert ours(TEXT, [{"role": "user", "content": parts("a", "b")}]) == "<user>a\nb"


def test_other_kinds_of_text_parts_become_text():
    odd = [{"type": "input_text", "text": "a", "cache": 1}, "b", {"type": "refusal", "refusal": "c"}]
    assert ours(PARTS_OR_TEXT, [{"role": "user", "content": odd}]) == "<user>abc"
    assert ours(PARTS_OR_TEXT, [{"role": "user", "content": []}]) == "<user>"


def test_a_template_that_refuses_everything_says_so_only_to_requests():
    chat = ChatRenderer({"default": "{{ raise_exception('I only take songs') }}"}, {})
    with pytest.raises(RequestError, match="I only take songs"):
        chat.render([{"role": "user", "content": "Hi"}])


def test_each_template_of_a_model_has_its_own_forms():
    chat = ChatRenderer({"default": OBJECT_AS_JSON, "tool_use": NULL_FOR_CALLS}, {})
    tool = {"type": "function", "function": {"name": "weather"}}
    plain = chat.render(talk(), add_generation_prompt=False)
    assert '<call>{"name": "weather", "arguments": {"city"' in plain
    assert "<CALL>weather" in chat.render(talk(), tools=[tool], add_generation_prompt=False)


NINE_LETTERS = """{%- for message in messages %}{{- '<' + message.role + '>' }}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should have length 9!') }}{%- endif %}
{{- call.id + call.function.name + call.function.arguments | tojson }}
{%- endfor %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('IDs should have length 9!') }}{%- endif %}
{{- message.tool_call_id }}
{%- endif %}{{- message.content or '' }}{%- endfor %}"""


def test_ids_of_any_length_reach_a_template_that_wants_nine_letters():
    """Mistral's templates refuse others, also those that this engine gave."""
    function = {"name": "weather", "arguments": "{}"}

    def turn(call_id: str) -> str:
        call = {"id": call_id, "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
        ]
        return ours(NINE_LETTERS, messages)

    assert turn("abcdef123").count("abcdef123") == 2
    texts = {turn(call_id) for call_id in ("call_0123456789abcdef01234567", "c1", "call-of-9")}
    assert len(texts) == 3
    for text in texts:
        called, answered = text.split("<assistant>")[1].split("<tool>")
        assert called[:9] == answered[:9]
        assert called[:9].isalnum()


SYSTEM_FIRST = """{%- for message in messages %}
{%- if message['role'] == 'system' and not loop.first %}
{{- raise_exception('system comes first') }}{%- endif %}
{%- if loop.previtem and loop.previtem['role'] == message['role'] %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<' + message['role'] + '>' + message['content'] }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("sus", "<system>0<user>1\n\n2"),
        ("susu", "<system>0<user>1\n\n2\n\n3"),
        ("uasu", "<user>0<assistant>1<user>2\n\n3"),
        ("usau", "<user>0\n\n1<assistant>2<user>3"),
        ("uass", "<user>0<assistant>1<user>2\n\n3"),
        ("ussssu", "<user>0\n\n1\n\n2\n\n3\n\n4\n\n5"),
    ],
)
def test_a_late_system_message_joins_the_users_where_the_template_wants_it_first(
    roles: str, wanted: str
) -> None:
    """Claude Code sends such messages."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(number)} for number, role in enumerate(roles)]
    assert ChatRenderer({"default": SYSTEM_FIRST}, {}).render(messages) == wanted


def test_a_late_system_message_stays_where_the_template_shows_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert ChatRenderer({"default": OBJECT_BY_KEYS}, {}).render(messages) == "<user>a<system>b"


def test_a_late_system_message_joins_parts_where_the_template_wants_those() -> None:
    first = "{%- if messages[1:] | selectattr('role', 'equalto', 'system') | list %}"
    template = first + "{{- raise_exception('system comes first') }}{%- endif %}" + ONLY_PARTS
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert ChatRenderer({"default": template}, {}).render(messages) == "<user>a b "
