"""OpenAI requests: what real clients send is taken, what is wrong is refused by the name of its field."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.protocol.openai import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    InvalidBody,
    decode_body,
)
from leadline.protocol.openai import service as s
from leadline.protocol.openai.chat import FunctionCall, NamedToolChoice, ToolCall, UserMessage
from leadline.protocol.openai.constraints import JsonSchemaFormat

HI = [{"role": "user", "content": "hi"}]


def chat(**fields) -> ChatCompletionRequest:
    return decode_body(json.dumps({"messages": HI} | fields).encode(), ChatCompletionRequest)


def completion(**fields) -> CompletionRequest:
    return decode_body(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)


def test_a_conversation_with_tools_decodes_role_by_role():
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": [{"type": "text", "text": "Really."}]},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ],
        tools=[{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}],
        tool_choice={"type": "function", "function": {"name": "w"}},
    )
    assert [type(m).__name__[:-7] for m in request.messages] == [
        "Developer",
        "System",
        "User",
        "Assistant",
        "Tool",
    ]
    assert request.messages[3].tool_calls == [
        ToolCall(id="c1", function=FunctionCall(name="w", arguments="{}"))
    ]
    assert isinstance(request.tool_choice, NamedToolChoice)


def test_a_message_goes_back_to_the_dictionary_it_came_from():
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert msgspec.to_builtins(chat(messages=[message]).messages[0]) == message


def test_unknown_fields_and_explicit_nulls_are_no_errors():
    nulls = {name: None for name in ChatCompletionRequest.__struct_fields__ if name != "messages"}
    assert chat(**nulls, store=True, service_tier="auto", metadata={}) == chat()


@pytest.mark.parametrize("field", ChatCompletionRequest.not_supported)
def test_what_would_change_the_answer_and_is_not_supported_is_refused_with_what_is(field):
    """Ignored, a constraint in another server's spelling would give an answer that breaks it."""
    for value in ("[0-9]+", {"type": "object"}, ["a"]):
        body = {"messages": HI, field: value}
        with pytest.raises(
            InvalidBody, match=rf"{field} is not supported; (use|leave it out|send) ?\w*"
        ) as caught:
            decode_body(json.dumps(body).encode(), ChatCompletionRequest)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("best_of", 3),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
    ],
)
def test_a_chat_that_asks_for_what_chats_do_not_have_is_refused(field, value):
    """All of them were ignored, so that the answer was none of what had been asked for."""
    with pytest.raises(InvalidBody, match=rf"^{field} is not supported; use ") as caught:
        chat(**{field: value})
    assert caught.value.param == field


def test_fields_of_other_servers_may_have_the_value_that_changes_nothing():
    """Clients that list all parameters they know send these."""
    both = {"use_beam_search": False, "bad_words": [], "logits_processors": [], "top_k": -1}
    of_chats = {"best_of": 1, "add_special_tokens": False, "documents": []}
    assert chat(**both, **of_chats, modalities=["text"]).messages == chat().messages
    assert completion(**both, echo=True, best_of=3, prompt_logprobs=0, add_special_tokens=True).echo


def test_beam_search_is_refused_in_completions_too():
    with pytest.raises(InvalidBody, match="use_beam_search is not supported; use sampling, "):
        completion(use_beam_search=True)


def test_a_schema_for_the_answer_is_kept_as_it_came():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    request = chat(response_format=wanted)
    assert isinstance(request.response_format, JsonSchemaFormat)
    assert request.response_format.json_schema.schema == schema


def test_logit_bias_keys_are_token_ids():
    assert chat(logit_bias={"42": -100}).logit_bias == {42: -100.0}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_comes_in_four_forms(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, "a"], [[1], 2], [-1], [2**32], [True], None])
def test_any_other_prompt_is_an_error_at_prompt(prompt):
    with pytest.raises(InvalidBody) as caught:
        completion(prompt=prompt)
    assert caught.value.param.startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"top_logprobs": -2}, "top_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"priority_class": "urgent"}, "priority_class"),
        ({"queue_timeout": -1}, "queue_timeout"),
        ({"deadline": 0}, "deadline"),
        ({"resume_token_ids": ["a"]}, "resume_token_ids[0]"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(fields, param):
    with pytest.raises(InvalidBody) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert "`" in caught.value.message or "'" in caught.value.message


def test_only_text_completions_may_ask_for_no_tokens():
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    with pytest.raises(InvalidBody, match="max_tokens"):
        completion(max_tokens=-2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": NaN}',
        b"[]",
        b"null",
        b'{"ignored": ' + b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_an_error(body):
    with pytest.raises(InvalidBody):
        decode_body(body, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rb'{"prompt": "a\ud800"}', r"holds \ud800, half of a surrogate pair"),
        (rb'{"prompt": "\udc01 b"}', r"holds \udc01, half of a surrogate pair"),
        (rb'{"prompt": "\\ud800', "truncated"),
        (rb'{"prompt": "\ud83d\ude00', "truncated"),
        (b" \n", "the body is empty"),
    ],
)
def test_what_is_no_json_is_told_as_it_is(body, words):
    """The decoder itself calls a text that ends in half a pair truncated."""
    with pytest.raises(InvalidBody) as caught:
        decode_body(body, CompletionRequest)
    assert words in caught.value.message


IMAGE = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {"5": 1, "not_a_token_id": 1}}, "'not_a_token_id'"),
        ({"logit_bias": {"5": 1, "7": 101}}, "'7': 101"),
        ({"n": 0}, "got 0"),
        ({"n": "three"}, "'three'"),
        ({"n": 1.5}, "1.5"),
        ({"temperature": 9}, "got 9"),
        ({"n": "x" * 1000}, "…"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "'image_url', but this server takes text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "'input_audio', but this server takes text only",
        ),
    ],
)
def test_an_error_names_the_value_at_fault(fields, words):
    with pytest.raises(InvalidBody) as caught:
        chat(**fields)
    assert words in caught.value.message
    assert len(caught.value.message) < 200


def test_whole_numbers_may_be_written_with_a_point():
    request = chat(
        max_tokens=3.0, n=2.0, seed=1e3, top_k=40.0, stop_token_ids=[1.0, 2.0], logit_bias={"7": 1}
    )
    assert (request.max_tokens, request.n, request.seed, request.top_k) == (3, 2, 1000, 40)
    assert (request.stop_token_ids, request.logit_bias) == ([1, 2], {7: 1.0})
    assert completion(prompt=[[1.0, 2.0], [3.0]]).prompts() == [[1, 2], [3]]


def test_harmless_forms_are_taken():
    assert (chat(max_tokens=-1).max_tokens, completion(max_tokens=-1).max_tokens) == (None, None)
    assert chat(max_completion_tokens=-1, max_tokens=5).max_completion_tokens is None
    assert (chat(top_p=0).top_p, chat(stop="").stop) == (0, "")
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "w", "arguments": "{}"}},
        {"role": "function", "name": "w", "content": "rain"},
    ]
    assert [type(m).__name__ for m in chat(messages=HI + older).messages[1:]] == [
        "AssistantMessage",
        "FunctionMessage",
    ]


def named(*names):
    return [{"type": "function", "function": {"name": name}} for name in names]


def test_custom_tools_are_skipped_and_named():
    odd = {"type": "custom", "custom": {"name": "a\r\nSet-Cookie: b"}}
    request = chat(tools=[{"type": "custom", "custom": {"name": "sh"}}, *named("f"), odd])
    assert [tool.function.name for tool in request.tools] == ["f"]
    assert request.skipped == ("tools[0] sh", "tools[2]")
    assert chat(tools=[{"type": "custom"}]).tools is None
    assert chat(tools=named("f")).skipped == ()


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_that_a_request_has(mode):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named("c", "a")}}
    request = chat(tools=named("a", "b", "c"), tool_choice=choice)
    assert [tool.function.name for tool in request.tools] == ["a", "c"]
    assert request.tool_choice == mode
    for tools in (named("a"), None):
        with pytest.raises(InvalidBody, match=r"got '(a|c)'") as caught:
            chat(tools=tools, tool_choice=choice)
        assert caught.value.param == "tool_choice.allowed_tools"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatCompletionRequest, {"messages": HI}),
        (CompletionRequest, {"prompt": "a"}),
        (s.TokenizeRequest, {"prompt": "a"}),
        (s.WarmupRequest, {"prompts": ["a"]}),
    ],
)
@given(data=st.data())
def test_any_json_decodes_or_is_an_error_of_ours(kind, needed, data):
    names = st.sampled_from(kind.__struct_fields__)
    fields = data.draw(st.dictionaries(names, json_values, max_size=4))
    body = json.dumps(needed | fields).encode("utf-8", "surrogatepass")
    with contextlib.suppress(InvalidBody):
        assert isinstance(decode_body(body, kind), kind)


@given(st.binary(max_size=100))
def test_any_bytes_decode_or_are_an_error_of_ours(body):
    with pytest.raises(InvalidBody):
        decode_body(b"{" + body, ChatCompletionRequest)


def test_a_missing_body_field_is_named():
    with pytest.raises(InvalidBody) as caught:
        decode_body(b"{}", ChatCompletionRequest)
    assert caught.value.param == "messages"


def test_tokenize_takes_a_text_or_a_conversation_and_not_both():
    assert decode_body(b'{"prompt": ""}', s.TokenizeRequest).prompt == ""
    both = json.dumps({"prompt": "a", "messages": HI}).encode()
    assert isinstance(
        decode_body(json.dumps({"messages": HI}).encode(), s.TokenizeRequest).messages[0], UserMessage
    )
    for body in (b"{}", both):
        with pytest.raises(InvalidBody, match="either"):
            decode_body(body, s.TokenizeRequest)


def test_the_json_schema_states_the_ranges_that_hold():
    kinds = [
        ChatCompletionRequest,
        CompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
        Completion,
        *(getattr(s, name) for name in s.__all__),
    ]
    _, parts = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    fields = parts["ChatCompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert fields["messages"]["minItems"] == 1
    assert len(parts["CompletionRequest"]["properties"]["prompt"]["oneOf"]) == 4
    assert parts["CompletionRequest"]["required"] == ["prompt"]
