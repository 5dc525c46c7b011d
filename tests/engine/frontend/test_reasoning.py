"""Reasoning: whatever the chunks, the same thought, content and calls; a cut thought is no content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from leadline.engine.config import REASONING_FORMATS
from leadline.engine.core.sequence import Thought, answer_of
from leadline.engine.frontend.reasoning import FORMATS, ModelReasoning, OutputParser, detect_format
from leadline.engine.frontend.tool_formats import HERMES, ParsedText, ToolCall
from leadline.protocol.text.tokenizer import Tokenizer

BY_NAME = {one.name: one for one in FORMATS}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parser_of(name: str, begins: Any = "open", *, calls: bool = False) -> OutputParser:
    return OutputParser(BY_NAME[name].parser(begins), HERMES.parser(()) if calls else None)


def stream(parser: OutputParser, chunks: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) that the parts add up to."""
    calls: list[ToolCall] = []
    parts = [*map(parser.push, chunks), parser.finish()]
    for part in parts:
        part.add_to(calls)
    texts = "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
    return *texts, [(call.name, call.arguments) for call in calls]


def bypassing(parser: OutputParser, chunks: list[str]) -> tuple[str, str]:
    """(reasoning, content), where the parser does not get what is plain."""
    found = {"reasoning": "", "content": ""}
    for chunk in [*chunks, None]:
        if chunk is not None and (field := parser.plain(chunk)) is not None:
            found[field] += chunk
            continue
        parsed = parser.finish() if chunk is None else parser.push(chunk)
        found["reasoning"] += parsed.reasoning
        found["content"] += parsed.content
    return found["reasoning"], found["content"]


def test_most_pieces_in_the_middle_need_no_parsing():
    parser = parser_of("think")
    assert [parser.plain(piece) for piece in ("<think>", "Two")] == [None, None]
    parser.push("<think>Two")
    assert [parser.plain(piece) for piece in (" and", "\n", "</think>")] == ["reasoning", None, None]
    parser.push("</think>\n")
    assert parser.plain("Four") is None
    parser.push("Four")
    assert parser.plain("<b>\n") == "content"
    assert parser_of("think", calls=True).plain("Four") is None


def whole(name: str, text: str, begins: Any = "open") -> tuple[str, str]:
    return stream(parser_of(name, begins), [text])[:2]


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks, at, turn = [], 0, 0
    while at < len(text):
        chunks.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return chunks


FRAGMENTS = st.sampled_from(
    [
        *[
            "<think>",
            "</think>",
            "[THINK]",
            "[/THINK]",
            "<|channel>",
            "thought\n",
            "<channel|>",
            "<",
            "[",
            "/",
        ],
        *[
            "<|start|>assistant",
            "<|channel|>",
            "analysis",
            "final",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "to=",
        ],
        *["commentary to=functions.add <|constrain|>json", "word", " ", "\n\n", "th", "ink>", CALL, "<tool_"],
    ]
)


@pytest.mark.parametrize("begins", ["inside", "open", "answer"])
@pytest.mark.parametrize("name", BY_NAME)
@given(
    fragments=st.lists(FRAGMENTS, max_size=14),
    end=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
)
@settings(max_examples=120, deadline=None)
def test_any_splitting_gives_the_same_reasoning_content_and_calls(name, begins, fragments, end, sizes):
    text = "".join(fragments)
    text = text[: max(0, len(text) - end)]
    expected = stream(parser_of(name, begins, calls=True), [text])
    assert stream(parser_of(name, begins, calls=True), cut(text, sizes)) == expected
    assert stream(parser_of(name, begins, calls=True), list(text)) == expected
    if name == "harmony":  # where words may stand in headers, which are markup
        return
    reasoning, content = whole(name, text, begins)
    assert bypassing(parser_of(name, begins), cut(text, sizes)) == (reasoning, content)
    assert bypassing(parser_of(name, begins), list(text)) == (reasoning, content)
    assert (reasoning + content).count("word") == text.count("word"), "nothing is lost but markup"


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("think", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("gemma4", "<|channel>thought\n", "<channel|>"),
    ],
)
def test_a_thought_between_tags_is_reasoning(name, opening, closing):
    thought, answer = "Two and two.\n\nFour?", "It is four. "
    assert whole(name, f"{opening}\n{thought}\n{closing}\n\n{answer}") == (thought, answer)
    assert whole(name, f"\n{opening}{thought}{closing}{answer}") == (thought, answer)
    assert whole(name, f"{thought}\n{closing}\n\n{answer}", "inside") == (thought, answer)
    assert whole(name, f"{opening}\n\n{closing}\n\n{answer}") == ("", answer), "thinking switched off"
    assert whole(name, answer, "answer") == whole(name, answer) == ("", answer)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_thought_that_is_cut_is_a_thought(name):
    opening = BY_NAME[name].opening
    assert whole(name, f"{opening}Two and ") == ("Two and", "")
    assert whole(name, "Two and <", "inside") == ("Two and <", "")


def test_only_the_first_tag_opens_a_thought():
    text = "Write <think> and </think> around it."
    assert whole("think", text) == ("", text)
    assert whole("think", f"<think>a</think>{text}") == ("a", text)
    assert whole("gemma4", "a <|channel>thought\nb<channel|>\nc") == ("b", "a c"), (
        "a token that no text holds"
    )
    later = "a<channel|>b <|channel>thought\nc<channel|>d"
    assert whole("gemma4", later, "inside") == ("ac", "b d"), "the label is no part of it"


def test_calls_behind_a_thought_are_parsed_and_those_within_are_words():
    text = f"<think>I could {CALL}.</think>\n\n{CALL}"
    assert stream(parser_of("think", calls=True), [text]) == (
        f"I could {CALL}.",
        "",
        [("add", '{"a": 1}')],
    )


def test_reasoning_streams_at_once_and_tags_never_show():
    parser = parser_of("think")
    assert parser.push("<thi") == ParsedText()
    assert parser.push("nk>\nTwo") == ParsedText(reasoning="Two")
    assert parser.thinking
    assert parser.push(" and </thi") == ParsedText(reasoning=" and")
    assert parser.push("nk>") == ParsedText()
    assert not parser.thinking
    assert parser.push("\n\n") == ParsedText()
    assert parser.push("Four ") == ParsedText("Four ")


def test_harmony_channels_become_reasoning_content_and_calls_with_their_markup():
    header = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    call = f'<|start|>assistant{header}{{"a": 2}}<|call|>'
    think = "<|channel|>analysis<|message|>Two and two.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>It is four."
    assert whole("harmony", think + final) == ("Two and two.", "It is four.")
    assert whole("harmony", f"{think}<|start|>assistant{think}{final}<|return|>") == (
        "Two and two.\n\nTwo and two.",
        "It is four.",
    )
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    assert whole("harmony", think + preamble + call) == ("Two and two.", f"I add.{call}")
    assert whole("harmony", "<|channel|>anal") == ("", ""), "a header that was cut"
    assert whole("harmony", '{"a": 1}') == ("", '{"a": 1}'), "an answer without markup"
    assert whole("harmony", "It is four.<|return|>", "answer") == ("", "It is four.")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}",
            "think",
        ),
        ("<|start|>assistant<|channel|>analysis", "harmony"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma4"),
        ("[SYSTEM_PROMPT]# HOW YOU SHOULD THINK [THINK]", "mistral"),
        ("<|im_start|>assistant\n", None),
    ],
)
def test_the_chat_template_tells_the_format(template, name):
    found = detect_format(template)
    assert (found and found.name) == name
    assert detect_format(template, "none") is None
    think = detect_format(template, "think")
    assert think is not None
    assert think.name == "think"


@pytest.mark.parametrize(
    ("name", "prompt", "begins"),
    [
        ("think", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "open"),
        ("think", "<|im_start|>assistant\n<think>\n", "inside"),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "answer"),
        ("think", "<|Assistant|></think>", "answer"),
        ("mistral", "[/INST]", "open"),
        ("gemma4", "<|turn>model\n", "open"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "answer"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "inside"),
        ("harmony", "<|start|>assistant", "open"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", "inside"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>", "answer"),
    ],
)
def test_the_rendered_prompt_tells_where_the_output_begins(name, prompt, begins):
    assert BY_NAME[name].begins(prompt) == begins


def test_a_message_to_continue_tells_whether_its_thought_is_over():
    think = BY_NAME["think"]
    assert think.begins("assistant\n<think>\nTwo and", "<think>\nTwo and") == "inside"
    assert think.begins("assistant\n<think>a</think>It", "<think>a</think>It") == "answer"
    assert think.begins("assistant\nIt is", "It is") == "answer"


def test_the_command_line_knows_the_formats():
    assert REASONING_FORMATS[:2] == ("auto", "none")
    assert set(REASONING_FORMATS[2:]) == set(BY_NAME)


@pytest.fixture(scope="module")
def harmony_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words and the special tokens of gpt-oss."""
    folder = tmp_path_factory.mktemp("harmony")
    words = ["[UNK]", "analysis", "final", "assistant", "json", "two"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = ("start", "end", "message", "channel", "constrain", "return", "call")
    backend.add_special_tokens([f"<|{mark}|>" for mark in marks])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_the_core_follows_harmony_by_its_tokens(harmony_tokenizer):
    reasoning = ModelReasoning(BY_NAME["harmony"], harmony_tokenizer)
    assert reasoning.hidden, "its markup is special tokens"
    spec = reasoning.spec("open", 2)
    assert spec is not None
    assert (spec.begins, spec.budget) == ("between", 2)
    thought = Thought(spec, structured=True)
    output = "<|channel|>analysis<|message|>two two"
    for token in harmony_tokenizer.encode(output, False):
        assert thought.allowed.anything or token in thought.allowed.tokens
        thought.take(token)
    forced = []
    while thought.allowed.tokens:
        forced += thought.allowed.tokens
        thought.take(forced[-1])
    assert harmony_tokenizer.encode("<|end|><|start|>assistant<|channel|>final<|message|>", False) == forced
    assert thought.allowed.grammar
    assert reasoning.spec("answer") is None


def test_harmony_where_an_answer_has_a_form_begins_no_message_but_thoughts_and_answers(harmony_tokenizer):
    """A forced call was free to be a message to another recipient, which no schema holds."""
    spec = ModelReasoning(BY_NAME["harmony"], harmony_tokenizer).spec("open")
    assert spec is not None
    thought = Thought(spec, structured=True)
    text = "<|channel|>analysis<|message|>two<|end|><|start|>assistant<|channel|>"
    for token in harmony_tokenizer.encode(text, False):
        thought.take(token)
    assert set(thought.allowed.tokens) == {harmony_tokenizer.token_id(name) for name in ("analysis", "final")}


def test_an_answer_in_json_may_say_so_in_its_header(harmony_tokenizer):
    spec = ModelReasoning(BY_NAME["harmony"], harmony_tokenizer).spec("open")
    assert spec is not None
    header = "<|channel|>final <|constrain|>json<|message|>"
    assert answer_of(spec, [*harmony_tokenizer.encode(header, False), 5]) == [5]


def test_a_model_without_tokens_for_the_tags_is_not_followed(tokenizer):
    reasoning = ModelReasoning(BY_NAME["think"], tokenizer)
    assert not reasoning.hidden
    assert reasoning.spec("inside", 5) is None
