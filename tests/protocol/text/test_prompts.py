"""The prompt of a request, field by field, against templates whose output is written out here."""

from __future__ import annotations

import sys
import threading
from typing import cast

import msgspec
import pytest

from leadline.protocol.errors import RequestError
from leadline.protocol.openai import decode_body
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.openai.service import TokenizeRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import PromptInput, prompt_inputs, prompt_token_ids
from leadline.protocol.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if mood is defined %}<{{ mood }}>{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RENDERER = ChatRenderer({"default": TEMPLATE}, {})
NO_TOKENIZER = cast(Tokenizer, None)
"""Only a suffix takes one."""
TOOL = {"type": "function", "function": {"name": "f"}}


def of(kind: type, **fields: object) -> list[PromptInput]:
    return prompt_inputs(decode_body(msgspec.json.encode(fields), kind), RENDERER, NO_TOKENIZER)


@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[user]Hi[assistant]"),
        ({"add_generation_prompt": False}, "[user]Hi"),
        ({"continue_final_message": True}, "[user]Hi"),
        ({"continue_final_message": False}, "[user]Hi[assistant]"),
        ({"tools": [TOOL]}, "(f)[user]Hi[assistant]"),
        ({"tools": []}, "[user]Hi[assistant]"),
        ({"chat_template_kwargs": {"mood": "calm"}}, "[user]Hi<calm>[assistant]"),
    ],
)
def test_a_chat_is_rendered_and_gets_no_further_special_tokens(kind, fields, text):
    messages = [{"role": "user", "content": "Hi"}]
    assert of(kind, messages=messages, **fields) == [PromptInput(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", ""),
        ("auto", "(f)"),
        ("required", "(f)"),
        ({"type": "function", "function": {"name": "f"}}, "(f)"),
    ],
)
def test_tool_choice_none_hides_the_tools(choice, shown):
    messages = [{"role": "user", "content": "Hi"}]
    (prompt,) = of(ChatCompletionRequest, messages=messages, tools=[TOOL], tool_choice=choice)
    assert prompt.content == shown + "[user]Hi[assistant]"


def test_text_prompts_take_special_tokens_unless_told_otherwise():
    assert of(CompletionRequest, prompt="a") == [PromptInput("a", True)]
    assert of(CompletionRequest, prompt=["a", "b"], add_special_tokens=False) == [
        PromptInput("a", False),
        PromptInput("b", False),
    ]
    assert of(CompletionRequest, prompt=[1, 2]) == [PromptInput([1, 2], True)]
    assert of(CompletionRequest, prompt=[[1], [2]]) == [PromptInput([1], True), PromptInput([2], True)]
    assert of(TokenizeRequest, prompt="a") == [PromptInput("a", True)]
    assert of(TokenizeRequest, prompt="a", add_special_tokens=False) == [PromptInput("a", False)]


def test_output_that_was_already_sent_follows_the_prompt(sentencepiece):
    (prompt,) = of(CompletionRequest, prompt="the fox", resume_token_ids=[7, 8])
    assert prompt_token_ids(prompt, sentencepiece) == [*sentencepiece.encode("the fox"), 7, 8]
    (prompt,) = of(CompletionRequest, prompt=[3, 4], resume_token_ids=[7])
    assert prompt_token_ids(prompt, sentencepiece) == [3, 4, 7]
    (prompt,) = of(ChatCompletionRequest, messages=[{"role": "user", "content": "x"}], resume_token_ids=[9])
    rendered = sentencepiece.encode("[user]x[assistant]", add_special_tokens=False)
    assert prompt_token_ids(prompt, sentencepiece) == [*rendered, 9]


def test_a_batch_of_texts_encodes_as_they_do_one_by_one(tokenizer, sentencepiece):
    texts = ["the fox", "", " 12  <|im_end|>\n", "é🙂"]
    for one in (tokenizer, sentencepiece):
        assert one.encode_batch(texts) == [one.encode(text, add_special_tokens=False) for text in texts]
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode_batch(["fine", "\ud800"])


def test_a_long_text_encodes_as_its_parts_and_other_threads_run_meanwhile(tokenizer):
    line = "The quick brown fox jumps over the lazy dog.\n"
    began, ended, count = threading.Event(), threading.Event(), 0

    def run() -> None:
        nonlocal count
        while not ended.wait(0.0001):
            count += 1
            began.set()

    other, interval = threading.Thread(target=run), sys.getswitchinterval()
    other.start()
    began.wait()
    sys.setswitchinterval(1000)  # from here on threads take turns only where one gives up the GIL by itself
    try:
        before = count
        ids = tokenizer.encode(line * 2000)
        after = count
    finally:
        sys.setswitchinterval(interval)
        ended.set()
    other.join()
    assert after > before
    assert ids == tokenizer.encode(line) * 2000
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode(line * 2000 + "\ud800")
