"""Tool calls: whatever the chunks, streaming finds what the whole text holds; broken markup stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.errors import RequestError
from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.frontend.tool_formats import (
    FORMATS,
    CallParser,
    NamedCallParser,
    ParsedText,
    RequiredCallParser,
    ToolCall,
    detect_format,
    parse_whole,
)
from leadline.engine.frontend.tool_formats.json_calls import follow
from leadline.engine.frontend.tool_formats.parser import Steps
from leadline.engine.frontend.tool_schema import or_calls, plan_tools
from leadline.engine.sampling_params import StructuredSpec

NAMES = ("weather", "add")
BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}


def parser_of(tool_format: str, names=NAMES) -> CallParser:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return BY_NAME[tool_format].parser(tools)


def plain(calls: list[ToolCall]) -> list[tuple[str, str]]:
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return [(call.name, call.arguments) for call in calls]


def parse(tool_format: str, text: str, names=NAMES) -> tuple[str, list[tuple[str, str]]]:
    content, calls = parse_whole(parser_of(tool_format, names), text)
    return content, plain(calls)


def stream(parser: CallParser, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """What the parts of a stream add up to."""
    calls: list[ToolCall] = []
    parts = [*map(parser.push, chunks), parser.finish()]
    for part in parts:
        part.add_to(calls)
    return "".join(part.content for part in parts), plain(calls)


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


class BracketsParser(CallParser):
    """A format as a new file would have it: `[call NAME {...}]`."""

    def parse(self) -> Steps[None]:
        yield from self.content_until("[call ")
        name = yield from self.text_until(" ")
        self.begin(name)
        yield from follow(self, self.arguments)
        self.mark()
        yield from self.closing("]")


PARSERS: dict[str, Any] = {
    **{name: lambda name=name: parser_of(name) for name in ("hermes", "llama3_json")},
    "llama3_json of any tool": lambda: parser_of("llama3_json", ()),
    "required": lambda: RequiredCallParser(NAMES),
    "named": lambda: NamedCallParser("add"),
    "brackets": BracketsParser,
}


@pytest.mark.parametrize("kind", PARSERS)
@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    end=st.integers(0, 30),
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_streaming_gives_what_the_whole_text_gives(kind, fragments, end, sizes):
    text = "".join(fragments)
    text = text[: max(0, len(text) - end)]
    content, calls = parse_whole(PARSERS[kind](), text)
    assert stream(PARSERS[kind](), cut(text, sizes)) == (content, plain(calls))
    assert stream(PARSERS[kind](), list(text)) == (content, plain(calls))
    if kind in ("named", "required"):  # where white space and the beginning of a call are no content
        return
    if not calls:
        assert content == text, "text without a call comes through untouched"
    # Nothing is lost but markup: each letter of the text that is no part of a call's frame is there.
    kept = content + "".join(name + arguments for name, arguments in plain(calls))
    assert sum(kept.count(word) for word in ("Sure", "text")) == sum(
        text.count(word) for word in ("Sure", "text")
    )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    kind=st.sampled_from(["hermes", "llama3_json", "required", "named", "text"]),
)
@settings(max_examples=250, deadline=None)
def test_any_arguments_arrive_as_they_are(arguments, indent, ascii_only, sizes, kind):
    text = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    inner = json.dumps(text, ensure_ascii=ascii_only) if kind == "text" else text
    call = f'{{"name": "add", "arguments": {inner}}}'
    parser = parser_of("hermes") if kind == "text" else PARSERS[kind]()
    whole = {"llama3_json": call, "required": f"[{call}]", "named": text}
    content, calls = stream(parser, cut(whole.get(kind, f"<tool_call>{call}</tool_call>"), sizes))
    assert (content, [name for name, _ in calls]) == ("", ["add"])
    assert json.loads(calls[0][1]) == arguments


def test_hermes_calls_are_found_between_content():
    text = f"Let me see.\n<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>{LLAMA}</tool_call>\n"
    assert parse("hermes", text) == (
        "Let me see.",
        [("add", '{"a": 1, "b": "x</tool_call>\\"}{"}'), ("weather", '{"city": "Z{ü}rich"}')],
    )


def test_whitespace_around_calls_goes_with_them_but_words_stay_apart():
    call = f"<tool_call>{GOOD}</tool_call>"
    assert parse("hermes", f"{call}\n\nDone. ")[0] == "Done. "
    assert parse("hermes", f"First.\n{call}\n{call}\n\nDone.")[0] == "First.\n\nDone."
    assert parse("hermes", f"  {call}\n")[0] == ""


def test_content_before_a_call_streams_at_once_and_markup_never_shows():
    parser = parser_of("hermes")
    assert parser.push("Let me ").content == "Let me"
    assert parser.push("see. <to").content == " see."
    assert parser.push("ol_call>") == ParsedText()
    assert [part.name for part in parser.push(GOOD).calls] == ["add"]
    assert parser.push("</tool_call>") == ParsedText()
    assert parser.finish() == ParsedText()


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {'),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {'),
        ("required", '[{"name":"add","parameters":{'),
        ("named", "{"),
    ],
)
def test_a_call_streams_id_and_name_at_once_and_then_its_arguments(kind, opening):
    parser = PARSERS[kind]()
    parts = [parser.push(char) for char in opening]
    assert parts[:-1] == [ParsedText()] * (len(opening) - 1)
    (begun,) = parts[-1].calls
    assert (begun.index, begun.name, begun.arguments) == (0, "add", "{")
    assert begun.id
    for piece in ('"a": ', '"some ', "words", '", "n":', "1"):
        (part,) = parser.push(piece).calls or [None]
        if piece == "1":
            assert part is None, "a number may go on"
        else:
            assert (part.index, part.id, part.name, part.arguments) == (0, None, None, piece)
    (part,) = parser.push("}").calls
    assert part.arguments == "1}"


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": '),
        ("llama3_json", '{"name": "add", "parameters": '),
        ("required", '[{"name": "add", "parameters": '),
        ("named", ""),
    ],
)
def test_a_call_that_is_cut_is_a_call(kind, opening):
    arguments = '{"a": [1, true, null, -2.5e3], "b": "two\\n\\u00e9"}'
    for end in range(1, len(arguments)):
        content, calls = parse_whole(PARSERS[kind](), opening + arguments[:end])
        assert (content, [call.name for call in calls]) == ("", ["add"])
        rest = calls[0].arguments
        assert arguments.startswith(rest) or "\\" in rest, "half an escape has no JSON form"


def test_what_breaks_off_within_a_call_is_content_from_there():
    opening = '<tool_call>{"name": "add", "arguments": '
    assert parse("hermes", opening + '{"a": NaN}}</tool_call> y') == (
        "NaN}}</tool_call> y",
        [("add", '{"a": ')],
    )
    assert parse("hermes", opening + '{}, "x": ?}</tool_call>')[0] == ', "x": ?}</tool_call>'
    # A brace that is missing is no loss.
    assert parse("hermes", opening + '{"a": 1}</tool_call>') == ("", [("add", '{"a": 1}')])


def test_what_models_do_not_escape_is_escaped():
    text = '<tool_call>{"name": "add", "arguments": {"re": "\\d+\\.", "s": "1\n\t2\x01"}}</tool_call>'
    (call,) = parse("hermes", text)[1]
    assert json.loads(call[1]) == {"re": "\\d+\\.", "s": "1\n\t2\x01"}


def test_what_only_looks_like_markup_is_given_back():
    parser = parser_of("hermes")
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
        '{"name": "f", "arguments": "{\\"x\\": NaN}"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"arguments": {"x": 1}, "name": 3}',
        '{"name": "\\ud83d", "arguments": {}}',
    ],
)
def test_malformed_calls_are_content_as_written(body):
    text = f"x <tool_call>{body}</tool_call> y"
    assert parse("hermes", text) == (text, [])


@pytest.mark.parametrize("named", [True, False])
def test_half_a_surrogate_pair_in_arguments_has_a_json_form(named):
    """An answer that holds it bare cannot be encoded."""
    arguments = '{"face": "\\ud83d", "é": 1}'
    if named:
        _, calls = parse_whole(NamedCallParser("f"), arguments)
    else:
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        _, calls = parse_whole(parser_of("hermes"), text)
    assert json.loads(calls[0].arguments.encode()) == {"face": "\ud83d", "é": 1}


def test_a_missing_closing_tag_is_forgiven_when_the_json_is_complete():
    for end in ("", "\n</tool_c"):
        content, calls = parse("hermes", f"<tool_call>\n{GOOD}{end}")
        assert (content, [name for name, _ in calls]) == ("", ["add"])
    cut_short = '<tool_call>{"name": "ad'
    assert parse("hermes", cut_short) == (cut_short, [])


def test_a_list_in_one_tag_is_several_calls():
    content, calls = parse("hermes", f"<tool_call>[{GOOD}, {LLAMA}]</tool_call>")
    assert (content, [name for name, _ in calls]) == ("", ["add", "weather"])


def test_arguments_given_as_json_text_and_raw_newlines_are_understood():
    first = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    text = first + '<tool_call>{"name": "g", "arguments": {"s": "1\n2"}}</tool_call>'
    assert [json.loads(arguments) for _, arguments in parse("hermes", text)[1]] == [{"a": 1}, {"s": "1\n2"}]


@pytest.mark.parametrize("before", ["", "  \n", "<|python_tag|>"])
def test_llama_json_is_a_call_at_the_start(before):
    assert parse("llama3_json", before + LLAMA) == ("", [("weather", '{"city": "Z{ü}rich"}')])


def test_several_llama_calls_are_separated_by_semicolons():
    content, calls = parse("llama3_json", f"{LLAMA}; {LLAMA}\n{LLAMA};")
    assert (content, len(calls)) == ("", 3)


def test_llama_content_may_come_before_the_tag():
    content, calls = parse("llama3_json", f"I will look. <|python_tag|>{LLAMA}")
    assert (content, len(calls)) == ("I will look.", 1)


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
    assert parse("llama3_json", text) == (text, [])


def test_an_ordinary_json_answer_streams_once_it_is_known_to_be_none():
    parser = parser_of("llama3_json")
    assert parser.push('{"name": "Bo').content == ""
    assert parser.push('b", "age": 3} and').content == '{"name": "Bob", "age": 3} and'
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
    assert detect_format(template, model_type).name == expected


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
    _, parsed = parse_whole(RequiredCallParser(plan.names), json.dumps(calls))
    assert [(c.name, json.loads(c.arguments)) for c in parsed] == [("tree", nested), ("ping", {})]


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
    assert stream(NamedCallParser("tree"), cut(text, [3])) == ("", [("tree", text)])


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


def test_a_required_call_cut_before_its_name_is_no_content():
    assert stream(RequiredCallParser(("tree", "ping")), ['[{"na', 'me": "t']) == ("", [])
    assert stream(RequiredCallParser(("tree",)), ['[{"na', 'me": "t']) == ("", [("tree", "")])
    whole = '[{"name": "ping", "parameters": {}}'
    assert stream(RequiredCallParser(("tree", "ping")), [whole, ', {"name']) == ("", [("ping", "{}")])


def test_a_forced_call_moves_ids_and_anchors_with_its_tool_and_leaves_constants_alone(compiler, tokenizer):
    """zod and pydantic write `$id`, `$schema` and anchors; a constant may hold a key `$ref`."""
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/f",
        "type": "object",
        "properties": {
            "a": {"$ref": "#here"},
            "b": {"$ref": "https://example.com/f#/$defs/x"},
            "c": {"const": {"$ref": "#/nowhere"}},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
        "$defs": {"x": {"$anchor": "here", "type": "integer"}},
    }
    twin = {**parameters, "$defs": {"x": {"$anchor": "here", "type": "null"}}}
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "twin", "parameters": twin}},
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
    ]
    arguments = {"a": 1, "b": 2, "c": {"$ref": "#/nowhere"}}
    call = [{"name": "f", "parameters": arguments}]
    assert accepts(compiler, tokenizer, plan_tools(tools, "required").constraint, json.dumps(call))
    named = plan_tools(tools, {"type": "function", "function": {"name": "f"}})
    assert accepts(compiler, tokenizer, named.constraint, json.dumps(arguments))
    assert not accepts(compiler, tokenizer, named.constraint, json.dumps({**arguments, "c": {}}))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_that_cannot_be_used_are_refused_as_the_tools(compiler, choice):
    function = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}}
    with pytest.raises(RequestError, match="no finite text satisfies it") as refused:
        compiler.validate(plan_tools([{"type": "function", "function": function}], choice).constraint)
    assert refused.value.param == "tools"
    assert refused.value.code == "invalid_grammar"


HERMES_CALL = '<tool_call>\n{"name": "tree", "arguments": {"root": null}}\n</tool_call>'
LLAMA_CALL = '{"name": "tree", "parameters": {"root": null}}'


@pytest.mark.parametrize(
    ("tool_format", "call", "calls"),
    [
        ("hermes", HERMES_CALL, f"{HERMES_CALL}\n{HERMES_CALL}"),
        ("llama3_json", LLAMA_CALL, f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}"),
    ],
)
def test_with_a_schema_for_the_answer_a_model_may_call_or_answer(
    compiler, tokenizer, tool_format, call, calls
):
    answer = StructuredSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, '
                            '"required": ["a"], "additionalProperties": false}')  # fmt: skip
    form = BY_NAME[tool_format]
    both = or_calls(answer, plan_tools(TOOLS), form, tokenizer)
    for text in ('{"a": 1}', call, calls):
        assert accepts(compiler, tokenizer, both, text)
    for text in ('{"a": "x"}', call.replace("tree", "oak"), f'{{"a": 1}}{call}', "hello"):
        assert not accepts(compiler, tokenizer, both, text)
    content, made = parse(tool_format, calls, ["tree", "ping"])
    assert ([name for name, _ in made], content) == (["tree", "tree"], "")
    one = or_calls(answer, plan_tools(TOOLS[:1], parallel_tool_calls=False), form, tokenizer)
    assert accepts(compiler, tokenizer, one, call)
    assert not accepts(compiler, tokenizer, one, calls)


def test_a_constraint_that_is_no_json_stays_as_it_is(tokenizer):
    regex = StructuredSpec("regex", "a+")
    assert or_calls(regex, plan_tools(TOOLS), BY_NAME["hermes"], tokenizer) is regex


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
