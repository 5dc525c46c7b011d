"""Chat templates render as in transformers, and what they complain about reaches the caller (row E17)."""

from __future__ import annotations

import re

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leadline.engine.errors import RequestError, UnsupportedModel
from leadline.protocol.text.chat import ChatRenderer

# Written for these tests in the shapes models use: a header form, a ChatML form with tools, a strict form.
LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0].role == "system" %}
    {%- set preamble = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set preamble = "" %}
    {%- set rest = messages %}
{%- endif %}
<|start|>system<|end|>

Today: {{ date_string }}
{{ preamble }}
{%- if tools is not none %}
    {%- for t in tools %}
{{ t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}<|eot|>
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|start|>ipython<|end|>\\n\\n" + message.content + "<|eot|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|end|>\\n\\n" + message.content | trim + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant<|end|>\\n\\n" }}
{%- endif %}"""

QWEN_LIKE = """{%- if tools %}
{{- "<|im_start|>system\\n# Tools\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == "skip" %}{%- continue %}{%- endif %}
  {%- generation %}{{- "<|im_start|>" ~ message.role ~ "\\n" ~ message.content }}{%- endgeneration %}
  {%- for call in message.tool_calls or [] %}
  {%- set shown = {"name": call.function.name, "arguments": call.function.arguments} %}
  {{- "\\n<tool_call>\\n" ~ shown | tojson ~ "\\n</tool_call>" }}
  {%- endfor %}
  {{- "<|im_end|>\\n" }}
  {%- if loop.index0 == ns.last and enable_thinking is defined and not enable_thinking %}
  {{- "/no_think\\n" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""

STRICT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}
{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & 'Zeit'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "<b>Hi</b> 😀"}],
    "three turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": " c "},
    ],
    "tool call": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"t": 21}'},
    ],
}


@pytest.fixture(scope="module")
def reference(smollm_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm_folder)


def renderer(tokenizer, source: str) -> ChatRenderer:
    return ChatRenderer({"default": source}, tokenizer.special_tokens)


@pytest.mark.parametrize("source", ["smollm2", LLAMA_LIKE, QWEN_LIKE], ids=["smollm2", "llama", "qwen"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_it_renders_what_transformers_renders(tokenizer, reference, source, name, tools, prompt):
    source = tokenizer.chat_template if source == "smollm2" else source
    extra = {"enable_thinking": False}
    expected = reference.apply_chat_template(
        CONVERSATIONS[name],
        tools,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=prompt,
        **extra,
    )
    got = renderer(tokenizer, source).render(
        CONVERSATIONS[name], tools=tools, add_generation_prompt=prompt, template_kwargs=extra
    )
    assert got == expected


@pytest.mark.parametrize("source", ["smollm2", LLAMA_LIKE, QWEN_LIKE], ids=["smollm2", "llama", "qwen"])
@pytest.mark.parametrize("beginning", ["The answer", "The answer ", "The answer\n", "  x"])
def test_continuing_the_final_message_agrees_with_transformers(tokenizer, reference, source, beginning):
    source = tokenizer.chat_template if source == "smollm2" else source
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": beginning}]
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    got = renderer(tokenizer, source).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert got == expected
    assert got.endswith((beginning, beginning.strip()))
    assert messages[-1]["content"] == beginning


def test_ids_of_a_rendered_chat_agree_with_transformers(tokenizer, reference):
    messages = CONVERSATIONS["one turn"]
    text = renderer(tokenizer, tokenizer.chat_template).render(messages)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_a_template_that_raises_is_the_callers_mistake_in_its_own_words(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="Conversation roles must alternate") as caught:
        renderer(tokenizer, STRICT).render(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nothing.at.all }}", "{{ ''.__class__.__mro__ }}"]
)
def test_whatever_goes_wrong_inside_a_template_is_a_400(tokenizer, source):
    with pytest.raises(RequestError, match="chat template rejected"):
        renderer(tokenizer, source).render(CONVERSATIONS["one turn"])


def test_a_template_cannot_change_the_messages(tokenizer):
    with pytest.raises(RequestError, match="chat template rejected"):
        renderer(tokenizer, "{{ messages.append(1) }}").render(CONVERSATIONS["one turn"])


def test_a_model_without_a_template_says_what_to_do_instead(tokenizer):
    bare = ChatRenderer({}, {})
    assert not bare.available
    with pytest.raises(RequestError, match="/v1/completions"):
        bare.render(CONVERSATIONS["one turn"])


def test_a_template_that_is_not_jinja_is_refused_at_start():
    with pytest.raises(UnsupportedModel, match="'default' is not valid Jinja"):
        ChatRenderer({"default": "{% for %}"}, {})


def test_requests_with_tools_use_the_tool_template_where_there_is_one():
    chat = ChatRenderer({"default": "plain", "tool_use": "with tools"}, {})
    assert chat.render(CONVERSATIONS["one turn"]) == "plain"
    assert chat.render(CONVERSATIONS["one turn"], tools=TOOLS) == "with tools"
    assert chat.source_for(tools=True) == "with tools"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_named(tokenizer, messages, param):
    with pytest.raises(RequestError) as caught:
        renderer(tokenizer, tokenizer.chat_template).render(messages)
    assert caught.value.param == param


def test_content_parts_become_text_and_none_becomes_nothing(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "name": None}]
    text = renderer(tokenizer, "{% for m in messages %}{{ m | tojson }}{% endfor %}").render(messages)
    assert text == '{"role": "user", "content": "one\\ntwo"}{"role": "assistant", "content": ""}'


def test_arguments_sent_as_json_text_reach_the_template_as_an_object(tokenizer):
    call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    as_text = [*CONVERSATIONS["tool call"]]
    as_text[1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = renderer(tokenizer, QWEN_LIKE)
    assert chat.render(as_text) == chat.render(CONVERSATIONS["tool call"])


def test_developer_is_system_unless_the_template_knows_it(tokenizer):
    messages = [{"role": "developer", "content": "x"}]
    assert renderer(tokenizer, "{{ messages[0].role }}").render(messages) == "system"
    knowing = "{% if messages[0].role == 'developer' %}known{% endif %}"
    assert renderer(tokenizer, knowing).render(messages) == "known"


def test_template_arguments_may_not_replace_fields_of_the_request(tokenizer):
    chat = renderer(tokenizer, "{{ style }}")
    assert chat.render(CONVERSATIONS["one turn"], template_kwargs={"style": "s"}) == "s"
    with pytest.raises(RequestError, match="'messages'"):
        chat.render(CONVERSATIONS["one turn"], template_kwargs={"messages": []})


def test_continuing_and_beginning_a_message_exclude_each_other(tokenizer):
    with pytest.raises(RequestError, match="add_generation_prompt"):
        renderer(tokenizer, LLAMA_LIKE).render(CONVERSATIONS["one turn"], continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the final message out"):
        renderer(tokenizer, "nothing").render(
            CONVERSATIONS["one turn"], continue_final_message=True, add_generation_prompt=False
        )


def test_templates_know_today(tokenizer):
    text = renderer(tokenizer, "{{ strftime_now('%Y-%m-%d') }}").render(CONVERSATIONS["one turn"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].role",
        "messages[0].items is callable",
        "messages[0].pop",
        "messages[0].missing is defined",
        "messages[0].__class__",
        "messages[0].update(role='x')",
        "messages.append(1)",
        "messages[0]['role'].format",
        "loop",
    ],
)
def test_the_sandbox_answers_as_jinja2s_own(expression):
    source = (
        "{% for m in messages %}{{ loop.first }}{{ loop.cycle is callable }}{{ "
        + expression
        + " }}{% endfor %}"
    )
    message = {"role": "user", "content": "Hi", "pop": "key"}

    def outcome(render):
        try:
            return re.sub(r"0x\w+", "", render())
        except Exception as error:
            return type(error.__cause__ or error), str(error).rpartition(": ")[2]

    stock = ImmutableSandboxedEnvironment().from_string(source)
    ours = ChatRenderer({"default": source}, {})
    assert outcome(lambda: ours.render([message])) == outcome(lambda: stock.render(messages=[message]))
