"""OpenAI answers: the real client's own types parse them, and empty extensions are left out."""

import json

from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from leadline.protocol.errors import encode_error
from leadline.protocol.openai import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    decode_body,
    encode_body,
)
from leadline.protocol.openai import answers as r
from leadline.protocol.openai.chat import FunctionCall, ToolCall
from leadline.protocol.openai.common import PromptTokensDetails, Usage

USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    total_tokens=7,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
)


def test_a_chat_answer_is_what_the_openai_client_expects():
    answer = ChatCompletion(
        id="c",
        created=1,
        model="m",
        usage=USAGE,
        choices=[
            r.ChatChoice(
                index=0,
                message=r.ChatResponseMessage(
                    tool_calls=[ToolCall(id="t", function=FunctionCall(name="f", arguments="{}"))]
                ),
                finish_reason="tool_calls",
                logprobs=r.ChatLogprobs(
                    content=[
                        r.ChatTokenLogprob(
                            token="a",
                            logprob=-0.5,
                            bytes=[97],
                            top_logprobs=[r.ChatTopLogprob(token="a", logprob=-0.5)],
                        )
                    ]
                ),
            )
        ],
    )
    parsed = OpenAIChatCompletion.model_validate_json(encode_body(answer))
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert parsed.choices[0].message.content is None
    assert parsed.choices[0].message.tool_calls[0].function.name == "f"
    assert parsed.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
    assert decode_body(encode_body(answer), ChatCompletion) == answer


def test_a_chat_chunk_says_only_what_is_new():
    delta = r.ChatDelta(tool_calls=[r.ToolCallDelta(index=0, function=r.FunctionCallDelta(arguments="{"))])
    chunk = ChatCompletionChunk(
        id="c", created=1, model="m", choices=[r.ChatChunkChoice(index=0, delta=delta)]
    )
    wire = json.loads(encode_body(chunk))
    assert wire["choices"][0]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert wire["choices"][0]["finish_reason"] is None
    assert "usage" not in wire
    parsed = OpenAIChunk.model_validate_json(encode_body(chunk))
    assert parsed.choices[0].delta.tool_calls[0].function.arguments == "{"
    assert decode_body(encode_body(chunk), ChatCompletionChunk) == chunk


def test_a_text_answer_is_what_the_openai_client_expects():
    answer = Completion(
        id="c",
        created=1,
        model="m",
        usage=USAGE,
        choices=[
            r.CompletionChoice(
                index=0,
                text="ab",
                finish_reason="length",
                logprobs=r.CompletionLogprobs(
                    tokens=["a", "b"],
                    token_logprobs=[-2.0, -1.0],
                    text_offset=[0, 1],
                    top_logprobs=[{"a": -2.0}, {"b": -1.0}],
                ),
                prompt_logprobs=[None, {7: r.PromptLogprob(logprob=-2.0, rank=3, decoded_token="x")}],
            )
        ],
    )
    wire = json.loads(encode_body(answer))
    assert wire["choices"][0]["prompt_logprobs"][1] == {
        "7": {"logprob": -2.0, "rank": 3, "decoded_token": "x"}
    }
    parsed = OpenAICompletion.model_validate_json(encode_body(answer))
    assert parsed.choices[0].logprobs.tokens == ["a", "b"]
    assert decode_body(encode_body(answer), Completion) == answer


def test_the_first_token_of_an_echoed_prompt_has_no_logprob():
    columns = r.CompletionLogprobs(tokens=["a"], token_logprobs=[None], text_offset=[0], top_logprobs=[None])
    assert json.loads(encode_body(columns))["token_logprobs"] == [None]


def test_an_error_has_all_four_fields():
    assert json.loads(encode_error("no", param="n", code="bad")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "bad"}
    }
