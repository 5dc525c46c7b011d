"""Tool calls: whatever the chunks, streaming finds what the whole text holds; malformed markup stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.errors import RequestError
from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.frontend.tool_schema import plan_tools
from leadline.engine.frontend.tools import (
    ForcedCallParser,
    ParsedText,
    ToolCall,
    detect_tool_format,
    make_tool_parser,
    parse_tool_calls,
)

NAMES = ("weather", "add")


def parse(tool_format: str, text: str, names=NAMES) -> ParsedText:
    return parse_tool_calls(make_tool_parser(tool_format, names), text)


def stream(parser, chunks: list[str]) -> tuple[ParsedText, list[ParsedText]]:
    parts = [*map(parser.push, chunks), parser.finish()]
    return ParsedText("".join(p.content for p in parts), [c for p in parts for c in p.calls]), parts


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks, at, turn = [], 0, 0
    while at < len(text):
        chunks.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return chunks


GOOD = '{"name": "add", "arguments": {"a": 1, "b": "x</tool_call>\\"}{"}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Z{ü}rich"}}'
FRAGMENTS = st.sampled_from(
    [
        *["Sure. ", "text", " ", "\n", "<tool_call>", "</tool_call>", "<tool_", "call>", "<", GOOD, LLAMA],
        *["{", "}", "[", "]", '"', "\\", "<|python_tag|>", "<|python", ";", ", ", "{}"],
        *['{"name": "Bob", "age": 3}', f"[{GOOD}, {GOOD}]"],
    ]
)


@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    tool_format=st.sampled_from(["hermes", "llama3_json"]),
    names=st.sampled_from([NAMES, ()]),
)
@settings(max_examples=1000, deadline=None)
def test_streaming_gives_what_the_whole_text_gives(fragments, sizes, tool_format, names):
    text = "".join(fragments)
    streamed, _ = stream(make_tool_parser(tool_format, names), cut(text, sizes))
    assert streamed == parse(tool_format, text, names)
    if not streamed.calls:
        assert streamed.content == text, "text without a call comes through untouched"
    assert [call.index for call in streamed.calls] == list(range(len(streamed.calls)))


def test_hermes_calls_are_found_between_content():
    text = f"Let me see.\n<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{LLAMA}</tool_call>\n"
    parsed = parse("hermes", text)
    assert parsed.content == "Let me see."
    assert parsed.calls == [
        ToolCall(0, "add", '{"a": 1, "b": "x</tool_call>\\"}{"}'),
        ToolCall(1, "weather", '{"city": "Z{ü}rich"}'),
    ]
    assert len({call.id for call in parsed.calls}) == 2


def test_whitespace_around_calls_goes_with_them_but_words_stay_apart():
    call = f"<tool_call>{GOOD}</tool_call>"
    assert parse("hermes", f"{call}\n\nDone. ").content == "Done. "
    assert parse("hermes", f"First.\n{call}\n{call}\n\nDone.").content == "First.\n\nDone."
    assert parse("hermes", f"  {call}\n").content == ""


def test_content_before_a_call_streams_at_once_and_markup_never_shows():
    parser = make_tool_parser("hermes")
    assert parser.push("Let me ").content == "Let me"
    assert parser.push("see. <to").content == " see."
    assert parser.push("ol_call>").content == ""
    assert parser.push(GOOD) == ParsedText()
    assert [call.name for call in parser.push("</tool_call>").calls] == ["add"]
    assert parser.finish() == ParsedText()


def test_what_only_looks_like_markup_is_given_back():
    parser = make_tool_parser("hermes")
    assert parser.push("a <tool").content == "a"
    assert parser.push("box>").content == " <toolbox>"


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        "[]",
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "\\ud83d", "arguments": {}}',
    ],
)
def test_malformed_calls_are_content_as_written(body):
    text = f"x <tool_call>{body}</tool_call> y"
    assert parse("hermes", text) == ParsedText(text)


@pytest.mark.parametrize("named", [True, False])
def test_half_a_surrogate_pair_in_arguments_has_a_json_form(named):
    """An answer that holds it bare cannot be encoded."""
    arguments = '{"face": "\\ud83d", "é": 1}'
    if named:
        parsed = parse_tool_calls(ForcedCallParser("f"), arguments)
    else:
        parsed = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    (call,) = parsed.calls
    assert json.loads(call.arguments.encode()) == {"face": "\ud83d", "é": 1}


def test_a_missing_closing_tag_is_forgiven_when_the_json_is_complete():
    assert [c.name for c in parse("hermes", f"<tool_call>\n{GOOD}").calls] == ["add"]
    assert [c.name for c in parse("hermes", f"<tool_call>\n{GOOD}\n</tool_c").calls] == ["add"]
    cut_short = "<tool_call>" + GOOD[:-3]
    assert parse("hermes", cut_short) == ParsedText(cut_short)


def test_a_list_in_one_tag_is_several_calls():
    assert [c.index for c in parse("hermes", f"<tool_call>[{GOOD}, {LLAMA}]</tool_call>").calls] == [0, 1]


def test_arguments_given_as_json_text_and_raw_newlines_are_understood():
    first = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    text = first + '<tool_call>{"name": "g", "arguments": {"s": "1\n2"}}</tool_call>'
    assert [json.loads(c.arguments) for c in parse("hermes", text).calls] == [{"a": 1}, {"s": "1\n2"}]


@pytest.mark.parametrize("before", ["", "  \n", "<|python_tag|>"])
def test_llama_json_is_a_call_at_the_start(before):
    parsed = parse("llama3_json", before + LLAMA)
    assert parsed == ParsedText("", [ToolCall(0, "weather", '{"city": "Z{ü}rich"}')])


def test_several_llama_calls_are_separated_by_semicolons():
    parsed = parse("llama3_json", f"{LLAMA}; {LLAMA}\n{LLAMA};")
    assert (parsed.content, len(parsed.calls)) == ("", 3)


def test_llama_content_may_come_before_the_tag():
    parsed = parse("llama3_json", f"I will look. <|python_tag|>{LLAMA}")
    assert (parsed.content, len(parsed.calls)) == ("I will look.", 1)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "unknown_tool", "parameters": {}}',
        "{broken",
        "An answer with {braces}.",
        "<|python_tag|>print(1)",
        "",
        "  ",
        f"see {LLAMA}",
    ],
)
def test_answers_that_are_no_llama_calls_stay_content(text):
    assert parse("llama3_json", text) == ParsedText(text)


def test_an_ordinary_json_answer_streams_once_it_is_known_to_be_none():
    parser = make_tool_parser("llama3_json", NAMES)
    assert parser.push('{"name": "Bob"').content == ""
    assert parser.push(', "age": 3} and').content == '{"name": "Bob", "age": 3} and'
    assert parser.push(" more").content == " more"


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("... <tool_call> ...", "qwen2", "hermes"),
        ("... <|python_tag|> ...", "llama", "llama3_json"),
        ("{% if message.role == 'ipython' %}{\"parameters\": ...", "llama", "llama3_json"),
        ("plain", "llama", "hermes"),
        (None, None, "hermes"),
        (None, "mllama", "llama3_json"),
    ],
)
def test_the_format_is_picked_by_template_then_family(template, model_type, expected):
    assert detect_tool_format(template, model_type) == expected


# tool_choice

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "tree", "parameters": TREE}},
    {"type": "function", "function": {"name": "ping"}},
]


def accepts(compiler: GrammarCompiler, tokenizer, spec, text: str) -> bool:
    matcher = compiler.matcher(spec)
    return all(matcher.accept(i) for i in tokenizer.encode(text)) and matcher.accept(2)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def test_auto_and_none_do_not_constrain():
    assert (plan_tools(TOOLS).tools, plan_tools(TOOLS, "auto").constraint) == (TOOLS, None)
    assert plan_tools(TOOLS, "auto").parse
    hidden = plan_tools(TOOLS, "none")
    assert (hidden.tools, hidden.parse) == (None, False)
    assert plan_tools(None).tools is None


def test_required_constrains_to_a_list_of_calls(compiler, tokenizer):
    plan = plan_tools(TOOLS, "required")
    nested = {"root": {"v": 1, "next": {"v": 2, "next": None}}}
    calls = [{"name": "tree", "parameters": nested}, {"name": "ping", "parameters": {}}]
    assert accepts(compiler, tokenizer, plan.constraint, json.dumps(calls))
    for bad in ([], [{"name": "other", "parameters": {}}], [{"name": "tree", "parameters": {}}], "hello"):
        assert not accepts(compiler, tokenizer, plan.constraint, json.dumps(bad))
    parsed = parse_tool_calls(ForcedCallParser(), json.dumps(calls))
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == [("tree", nested), ("ping", {})]


def test_without_parallel_calls_one_is_all(compiler, tokenizer):
    plan = plan_tools(TOOLS, "required", parallel_tool_calls=False)
    one = {"name": "ping", "parameters": {}}
    assert accepts(compiler, tokenizer, plan.constraint, json.dumps([one]))
    assert not accepts(compiler, tokenizer, plan.constraint, json.dumps([one, one]))


def test_a_named_tool_constrains_to_its_arguments(compiler, tokenizer):
    plan = plan_tools(TOOLS, {"type": "function", "function": {"name": "tree"}})
    text = '{"root": {"v": 1, "next": null}}'
    assert plan.named == "tree"
    assert accepts(compiler, tokenizer, plan.constraint, text)
    assert not accepts(compiler, tokenizer, plan.constraint, '{"root": 1}')
    parser = ForcedCallParser("tree")
    assert stream(parser, cut(text, [3]))[0].calls == [ToolCall(0, "tree", text)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_are_an_object_though_the_schema_forgets_to_say_so(compiler, tokenizer, choice):
    """Without it a forced call may be a number or a text, which is no call."""
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    plan = plan_tools([{"type": "function", "function": function}], choice)
    start = '[{"name": "f", "parameters": ' if choice == "required" else ""
    matcher = compiler.matcher(plan.constraint)
    assert all(matcher.accept(i) for i in tokenizer.encode(start))
    assert not matcher.accept(tokenizer.encode("5")[0])
    assert matcher.accept(tokenizer.encode("{")[0])


def test_a_forced_call_cut_short_is_content():
    assert parse_tool_calls(ForcedCallParser("tree"), '{"root": ') == ParsedText('{"root": ')
    assert parse_tool_calls(ForcedCallParser(), '[{"name": "t') == ParsedText('[{"name": "t')


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        ([], "required", "tool_choice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "tool_choice"),
        ([{}], None, "tools[0]"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools[0]"),
        ([{"function": {"name": "f", "parameters": [1]}}], None, "tools[0].function.parameters"),
        (TOOLS + TOOLS, None, "tools"),
    ],
)
def test_contradictions_between_tools_and_tool_choice_are_named(tools, choice, param):
    with pytest.raises(RequestError) as caught:
        plan_tools(tools, choice)
    assert caught.value.param == param
