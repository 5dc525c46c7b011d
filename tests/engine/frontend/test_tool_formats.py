"""Every format of tool calls: real outputs, any splitting of them, grammars for strict tools, detection."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import TEXTS, TOOLS

from leadline.engine.client.async_engine import AsyncEngine, ModelTexts
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError, RequestError
from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.frontend.tool_formats import FORMATS, ToolCall, detect_format, format_named, parse_whole
from leadline.engine.frontend.tool_formats.typed_text import types_of
from leadline.engine.frontend.tool_schema import calls_in_text, known_format, or_calls, plan_tools
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

NAMES = [tool_format.name for tool_format in FORMATS]
PARIS = {"city": "Paris", "days": 3}


def read(name: str, text: str) -> tuple[str, list[ToolCall]]:
    return parse_whole(format_named(name).parser(TOOLS), text)


def plain(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def test_every_format_has_texts():
    assert sorted(TEXTS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_found_in_what_models_write(name):
    texts = TEXTS[name]
    content, calls = read(name, texts.one)
    assert (content, plain(calls)) == ("", [("weather", PARIS)])
    content, calls = read(name, texts.several)
    assert content == "I will look."
    assert plain(calls) == [("weather", {**PARIS, "metric": True, "hours": [9, 12]}), ("ping", {})]
    content, calls = read(name, texts.note)
    assert (content, plain(calls)) == ("", [("note", {"text": 'line 1\n"é" {2}'})])


@pytest.mark.parametrize("name", NAMES)
def test_broken_markup_is_content_and_a_cut_call_is_a_call(name):
    assert read(name, TEXTS[name].broken) == (TEXTS[name].broken, [])
    content, (call,) = read(name, TEXTS[name].cut)
    assert (content, call.name, call.arguments) == ("", "weather", '{"city": "Par')


@pytest.mark.parametrize("name", NAMES)
def test_a_call_streams_its_name_at_once_and_its_text_as_it_comes(name):
    parser = format_named(name).parser(TOOLS)
    begun, arguments = False, ""
    for char in TEXTS[name].cut:
        for part in parser.push(char).calls:
            assert (part.name == "weather") != begun, "the name comes once, with the id"
            assert (part.id is None) == begun
            begun, arguments = True, arguments + part.arguments
    assert arguments == '{"city": "Par', "before the output has ended"


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_calls_and_content(name, data):
    """Also of texts that are cut, repeated and mixed, where markup is broken in the middle of a call."""
    texts = TEXTS[name]
    pieces = st.sampled_from([texts.one, texts.several, texts.note, texts.broken, texts.cut, "Sure. ", "\n"])
    text = ""
    for piece in data.draw(st.lists(pieces, min_size=1, max_size=3)):
        start = data.draw(st.integers(0, 5))
        text += piece[start : len(piece) - data.draw(st.integers(0, len(piece)))] if start < 3 else piece
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    content, calls = read(name, text)
    for lengths in (sizes, [1]):
        parser = format_named(name).parser(TOOLS)
        streamed: list[ToolCall] = []
        parts, at, turn = [], 0, 0
        while at < len(text):
            size = lengths[turn % len(lengths)]
            parts.append(parser.push(text[at : at + size]))
            at, turn = at + size, turn + 1
        parts.append(parser.finish())
        for part in parts:
            part.add_to(streamed)
        assert "".join(part.content for part in parts) == content
        assert [(c.name, c.arguments) for c in streamed] == [(c.name, c.arguments) for c in calls]
        assert len({call.id for call in streamed}) == len(streamed)
    if not calls:
        assert content == text


def test_ids_that_the_model_writes_are_the_calls_ids():
    assert [call.id for call in read("kimi_k2", TEXTS["kimi_k2"].several)[1]] == [
        "functions.weather:0",
        "functions.ping:1",
    ]
    twice = [call.id for call in read("kimi_k2", TEXTS["kimi_k2"].one * 2)[1]]
    assert twice[0] == "functions.weather:0"
    assert twice[1].startswith("call_")
    assert read("mistral", TEXTS["mistral"].note)[1][0].id == "VvvODy9mT"


# Grammars

ANSWER = StructuredSpec(
    "json_schema",
    json.dumps({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}),
)
_MARKUP = (
    *(tag for tool_format in FORMATS for tag in tool_format.tags),
    *("<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


@pytest.fixture(scope="module", params=["text", "special tokens"])
def grammars(request, smollm_folder, tmp_path_factory) -> tuple[GrammarCompiler, Tokenizer]:
    """SmolLM2's tokenizer, and one in which all markup is special tokens."""
    tokenizer = Tokenizer.load(smollm_folder)
    if request.param == "special tokens":
        folder = tmp_path_factory.mktemp("tokenizer")
        content = json.loads((smollm_folder / "tokenizer.json").read_text())
        token = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"] += [
            {"id": tokenizer.vocab_size + number, "content": tag, **token}
            for number, tag in enumerate(dict.fromkeys(_MARKUP))
        ]
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text((smollm_folder / "tokenizer_config.json").read_text())
        tokenizer = Tokenizer.load(folder)
    return GrammarCompiler(tokenizer), tokenizer


def takes(grammars: tuple[GrammarCompiler, Tokenizer], spec: StructuredSpec, text: str) -> bool:
    """Whether `text` is a whole output."""
    compiler, tokenizer = grammars
    matcher = compiler.matcher(spec)
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text)) and matcher.accept(2)


@pytest.mark.parametrize("name", NAMES)
def test_strict_tools_leave_text_free_and_hold_calls_to_the_schema(grammars, name):
    texts, tool_format = TEXTS[name], format_named(name)
    spec = calls_in_text(plan_tools(TOOLS), tool_format, grammars[1])
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "harmony" else ""
    answer = "<|channel|>final<|message|>Hello!" if name == "harmony" else "Hello! a < b [1] {2}"
    several = texts.several.removeprefix("I will look.<|start|>assistant")
    for text in ("", answer, before + texts.one, texts.note, before + several):
        assert takes(grammars, spec, text), text
    for text in (texts.wrong_type, before + texts.wrong_type, texts.one.replace("weather", "whether")):
        assert not takes(grammars, spec, text), text
    single = calls_in_text(plan_tools(TOOLS, parallel_tool_calls=False), tool_format, grammars[1])
    assert takes(grammars, single, texts.one)
    if tool_format.start is None:
        assert not takes(grammars, single, texts.several)


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_for_the_answer_leaves_the_choice_of_a_call(grammars, name):
    texts = TEXTS[name]
    spec = or_calls(ANSWER, plan_tools(TOOLS), format_named(name), grammars[1])
    for text in ('{"a": null}', texts.one, texts.note):
        assert takes(grammars, spec, text), text
    for text in ("Hello!", texts.wrong_type, '{"a": 1}'):
        assert not takes(grammars, spec, text), text


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_is_not_strict_takes_any_arguments(grammars, name):
    weather, note = ({**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS[:2])
    mixed = calls_in_text(plan_tools([weather, note, TOOLS[2]]), format_named(name), grammars[1])
    assert takes(grammars, mixed, TEXTS[name].wrong_type)
    assert takes(grammars, mixed, TEXTS[name].note)
    assert calls_in_text(plan_tools([weather, note]), format_named(name), grammars[1]) is None


# Which format


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']", "deepseek_v3"),
        ("'<|im_system|>tool_declare<|im_middle|>'", "kimi_k2"),
        ("'<|tool|>' + (tool['function'] | tojson) + '<|/tool|>'", "phi4_mini"),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "granite3"),
        ("'<|channel|>commentary to=functions.'", "harmony"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma4"),
        ("'<start_function_call>call:'", "functiongemma"),
        ('"List of tools: <|tool_list_start|>["', "lfm2"),
        (
            "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
            "pythonic",
        ),
        ('within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>', "hermes"),
        ("{% if message.role == 'ipython' %}{\"parameters\": ", "llama3_json"),
    ],
)
def test_a_template_shows_its_format(template, expected):
    assert detect_format(template, shows_tools=True).name == expected


def test_a_form_that_is_not_known_is_refused_unless_calls_are_forced_or_hidden():
    unknown = detect_format("<functions>{{ tools }}</functions>", "llama", shows_tools=True)
    assert unknown is None
    assert detect_format("no tools here", "llama", shows_tools=False).name == "hermes"
    with pytest.raises(RequestError, match="--tool-format NAME") as refused:
        known_format(plan_tools(TOOLS), unknown)
    assert (refused.value.param, refused.value.code) == ("tools", "unknown_tool_format")
    for choice in ("required", "none", {"type": "function", "function": {"name": "note"}}):
        assert known_format(plan_tools(TOOLS, choice), unknown) is None
    assert known_format(plan_tools(None), unknown) is None


def test_a_setting_names_the_format_and_a_wrong_name_stops_the_start():
    assert format_named("glm45").name == "glm45"
    config = EngineConfig(model="smollm2", tool_format="glm")
    with pytest.raises(ConfigError, match=r"tool_format must be one of deepseek_v3, .*, not 'glm'"):
        asyncio.run(AsyncEngine.start(config))


def test_the_demo_models_template_shows_no_tools_and_a_tool_template_does(smollm_folder):
    renderer = ModelTexts.load(str(smollm_folder), EngineConfig(model="smollm2")).renderer
    assert not renderer.shows_tools()
    shown = ChatRenderer({"default": "{{ messages[0].content }}{{ tools | tojson }}"}, {})
    assert shown.shows_tools()
    picky = ChatRenderer({"default": "{% if tools %}{{ raise_exception('no') }}{% endif %}"}, {})
    assert picky.shows_tools(), "it looks at them"


# Text to JSON by the schema

TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "zip": {"$ref": "#/$defs/code"},
        "n": {"type": "integer"},
        "x": {"type": ["number", "null"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "list": {"type": "array"},
        "unit": {"enum": ["c", "f"]},
        "any": {},
        "either": {"type": ["string", "integer"]},
    },
    "$defs": {"code": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", " null ", " null "),
        ("zip", "02134", "02134"),
        ("n", " 12 ", 12),
        ("n", "5.0", 5),
        ("n", "5.5", "5.5"),
        ("n", "many", "many"),
        ("n", "", ""),
        ("x", "-1.5e3", -1500.0),
        ("x", "None", None),
        ("x", "NaN", "NaN"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "yes", "yes"),
        ("flag", "null", None),
        ("list", '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ("list", "[1, {'a': True}]", [1, {"a": True}]),
        ("list", "[1, ", "[1, "),
        ("list", "[" * 5000, "[" * 5000),
        ("unit", "c", "c"),
        ("any", "12", 12),
        ("any", "12 apples", "12 apples"),
        ("any", '"quoted"', '"quoted"'),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("not in the schema", "{}", {}),
    ],
)
def test_a_parameters_text_becomes_json_by_its_type(parameter, text, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    output = (
        f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    content, (call,) = parse_whole(format_named("qwen3_coder").parser(tools), output)
    assert (content, json.loads(call.arguments)) == ("", {parameter: value})


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"""a "b"\nc"""', 'a "b"\nc'),
        ("'\\u00e9\\x41\\U0001F600\\d'", "éA😀\\d"),
        ("{'a': (1, 2.5e3, None), \"b\": [True, {}],}", {"a": [1, 2500.0, None], "b": [True, {}]}),
        ("''", ""),
        ("-3", -3),
        ("true", True),
    ],
)
def test_python_literals_become_json(literal, value):
    content, (call,) = read("lfm2", f"<|tool_call_start|>[f(a={literal}, b = 1)]<|tool_call_end|>")
    assert (content, json.loads(call.arguments)) == ("", {"a": value, "b": 1})


@pytest.mark.parametrize("literal", ["x", "f(1)", "{1: 2}", "1 + 2", "[" * 100, "'a' 'b'"])
def test_what_is_no_literal_is_content_from_there(literal):
    content, (call,) = read("lfm2", f"<|tool_call_start|>[f(a={literal})]<|tool_call_end|> end")
    assert content.endswith(")]<|tool_call_end|> end")
    assert call.name == "f"


def test_a_value_may_hold_markup_of_its_own_format():
    """Agents write files that hold such lines."""
    inner = "<function=f>\n<parameter=a>\nx\n<tool_call>"
    call = f"<function=note>\n<parameter=text>\n{inner}\n</parameter>\n</function>"
    output = f"<tool_call>\n{call}\n</tool_call>\nDone."
    content, (call,) = read("qwen3_coder", output)
    assert (content, json.loads(call.arguments)) == ("Done.", {"text": inner})


def test_a_qwen_call_without_its_outer_tag_is_one_if_the_tool_is_known():
    call = "<function=note>\n<parameter=text>\nx\n</parameter>\n</function>"
    assert plain(read("qwen3_coder", f"Well. {call}")[1]) == [("note", {"text": "x"})]
    prose = "Write <function=name> to call one."
    assert read("qwen3_coder", prose) == (prose, [])


def test_types_behind_references_are_found_once_however_often_they_are_named():
    me = {"$ref": "#/$defs/me"}
    root = {"$defs": {"me": {"anyOf": [me] * 1000}, "id": {"type": "integer"}}}
    assert types_of(me, root) == frozenset()
    assert types_of({"anyOf": [{"$ref": "#/$defs/id"}, {"type": "null"}]}, root) == {"integer", "null"}


def test_a_grammar_of_tools_stays_bounded_however_often_their_definitions_are_named(grammars):
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"big": {"description": "x" * 10_000}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    with pytest.raises(RequestError) as refused:
        calls_in_text(plan_tools([tool]), format_named("qwen3_coder"), grammars[1])
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_grammar")
