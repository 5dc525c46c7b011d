"""How a chat template learns of an effort, and of the thoughts of earlier turns."""

from __future__ import annotations

import pytest

from leadline.protocol.text.chat import ChatRenderer

SWITCH = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
EFFORT = (
    '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}'
    '{%- macro system() %}{{ "Reasoning: " + reasoning_effort }}{%- endmacro %}{{ system() }}'
)
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
LITERAL = "{{ reasoning_effort }}{# #}{% if reasoning_effort == 'none' %}!{% endif %}"


def render(template: str, effort: str | None, **variables: object) -> str:
    renderer = ChatRenderer({"default": template}, {})
    messages = [{"role": "user", "content": "Hi"}]
    return renderer.render(messages, reasoning_effort=effort, template_kwargs=variables).strip()


@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        (SWITCH, None, ""),
        (SWITCH, "none", "False"),
        (SWITCH, "minimal", "True"),
        (SWITCH, "high", "True"),
        (DEEPSEEK, None, "False"),
        (DEEPSEEK, "low", "True"),
        (DEEPSEEK, "none", "False"),
        (EFFORT, None, "Reasoning: medium"),
        (EFFORT, "high", "Reasoning: high"),
        (EFFORT, "xhigh", "Reasoning: high"),
        (EFFORT, "minimal", "Reasoning: low"),
        (EFFORT, "none", "Reasoning: medium"),
        (LITERAL, "none", "none!"),
        ("{{ messages[0].content }}", "high", "Hi"),
    ],
)
def test_an_effort_reaches_the_template_in_its_own_words(template, effort, shown):
    assert render(template, effort) == shown


def test_what_the_caller_says_to_the_template_wins():
    assert render(SWITCH, "none", enable_thinking=True) == "True"


def test_a_message_named_thinking_is_no_switch():
    template = "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert ChatRenderer({"default": template}, {}).effort_variables("none", tools=False) == {}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_the_thought_of_an_earlier_turn_is_there_by_the_name_that_the_template_reads(field, read):
    template = f"{{% for m in messages %}}{{{{ m.{read} or '-' }}}}|{{% endfor %}}"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", field: "They greet"}]
    assert ChatRenderer({"default": template}, {}).render(turns) == "-|They greet|"


def test_beside_calls_gpt_oss_takes_a_thought_or_a_text():
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ m.content or '' }}{{ m.thinking or '' }}{% endfor %}"
    )
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn = {"role": "assistant", "reasoning": "They ask", "tool_calls": calls}
    renderer = ChatRenderer({"default": template}, {})
    assert renderer.render([{**turn, "content": "I look."}]) == "I look."
    assert renderer.render([turn]) == "They ask"
