"""Prompts come out of TokenService as the engine's own code makes them, however much was remembered."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.gateway.tokens.service import TokenService
from leadline.protocol.chain import ChainNamespace, chain, short
from leadline.protocol.errors import ModelNotFound, RequestError
from leadline.protocol.load import LoadReport
from leadline.protocol.openai import decode_body
from leadline.protocol.openai.chat import ChatCompletionRequest, UserMessage
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.openai.service import PrefixChain, TokenizeRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import prompt_inputs, prompt_token_ids

IDENTITY = PrefixChain(model="m", revision="r", block_size=16)
LONG = "The sailor sings out the mark and the ship turns away from the shoal. " * 400


def serve(tokenizer, **settings) -> TokenService:
    return TokenService(
        tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens), **settings
    )


@pytest.fixture
def service(tokenizer):
    service = serve(tokenizer)
    yield service
    service.close()


def chat(*contents: str, **fields) -> ChatCompletionRequest:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return decode_body(msgspec.json.encode({"messages": messages, **fields}), ChatCompletionRequest)


def as_the_engine_does(service, request) -> list[list[int]]:
    prompts = prompt_inputs(request, service.renderer, service.tokenizer)
    return [prompt_token_ids(prompt, service.tokenizer) for prompt in prompts]


async def check(service, request, identity=IDENTITY, salt=""):
    expected = as_the_engine_does(service, request)
    found = await service.prompts(request, identity)
    assert [prompt.ids.tolist() for prompt in found] == expected
    for prompt, ids in zip(found, expected, strict=True):
        namespace = identity.namespace(cache_salt=salt)
        assert prompt.chain == [short(block) for block in chain(namespace, ids)]
        assert prompt.num_tokens == len(ids)
    at_once = service.at_once(request, identity)
    assert at_once is None or (at_once.ids, at_once.chain) == (found[0].ids, found[0].chain)
    return found


messages = st.lists(
    st.sampled_from(
        ["", " ", "Hi", "word word", "<|im_end|>", "<|eot_id|>\n", "a b", "é\u0301", "x" * 70, "\n1 2"]
    )
    | st.text(max_size=20),
    min_size=1,
    max_size=6,
)


sentences = st.lists(
    st.sampled_from(
        [
            "The",
            "sailor",
            "sings",
            "a",
            "don't",
            "can\u2019t",
            "x1",
            "2y",
            "É",
            "é.",
            ",",
            "'S",
            "\n",
            "<|im_end|>",
        ]
    ),
    max_size=40,
).map(" ".join)


@pytest.mark.parametrize("family", ["smollm", "llama3", "qwen", "sentencepiece"])
def test_every_turn_of_any_conversation_equals_full_tokenization(tokenizers_by_family, family):
    service = serve(tokenizers_by_family[family], memo_bytes=20_000, chain_memo_bytes=20_000)
    runner = asyncio.Runner()

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(contents=messages)
    def turns(contents: list[str]) -> None:
        async def all_turns() -> None:
            for turn in range(1, len(contents) + 1):
                await check(service, chat(*contents[:turn]))

        runner.run(all_turns())

    with runner:
        turns()
    service.close()


async def test_the_next_turn_tokenizes_and_hashes_only_what_is_new(service):
    await check(service, chat(LONG))
    encoded, hashed = service.counts.encoded, service._chains.hashed_blocks
    await check(service, chat(LONG, "A short answer.", "And a question?"))
    assert service.counts.encoded - encoded < 20
    assert service._chains.hashed_blocks - hashed < 3
    assert service.counts.reused > 5000


async def test_a_text_that_grows_is_not_tokenized_again(service):
    await check(service, CompletionRequest(prompt=LONG))
    encoded = service.counts.encoded
    await check(service, CompletionRequest(prompt=LONG + "What did he sing?"))
    assert service.counts.encoded - encoded < 8192 / 3


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"resume_token_ids": [5, 6, 7]},
        {"cache_salt": "tenant"},
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_every_field_that_shapes_a_chat_prompt_is_heeded(tokenizers_by_family, fields):
    service = serve(tokenizers_by_family["qwen"])
    plain = as_the_engine_does(service, chat("Hi"))
    request = chat("Hi", **fields)
    (found,) = await check(service, request, salt=fields.get("cache_salt", ""))
    changes_nothing = fields.get("tool_choice") == "none" or "cache_salt" in fields
    assert (found.ids.tolist() == plain[0]) == changes_nothing
    service.close()


async def test_the_final_message_can_be_continued(service):
    request = chat("Count.", "One, two, ", continue_final_message=True)
    (found,) = await check(service, request)
    assert service.tokenizer.decode(found.ids.tolist()).endswith("One, two, ")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Hello"},
        {"prompt": "Hello", "add_special_tokens": False},
        {"prompt": ["Hello", "<|eot_id|> there"]},
        {"prompt": [5, 6, 7, 8] * 20},
        {"prompt": [[5, 6], list(range(3000))]},
        {"prompt": "Hello", "resume_token_ids": [9] * 40},
    ],
)
@pytest.mark.parametrize("family", ["llama3", "sentencepiece"])
async def test_every_form_of_a_text_prompt_is_heeded(tokenizers_by_family, family, fields):
    service = serve(tokenizers_by_family[family])
    await check(service, CompletionRequest(**fields))
    await check(service, CompletionRequest(**fields))
    service.close()


async def test_token_id_prompts_that_begin_alike_share_their_chain(service):
    await check(service, CompletionRequest(prompt=list(range(5000))))
    hashed = service._chains.hashed_blocks
    await check(service, CompletionRequest(prompt=list(range(5100))))
    assert service._chains.hashed_blocks - hashed < 70


async def test_namespaces_never_mix(service):
    first = await service.prompts(chat(LONG), IDENTITY)
    other = PrefixChain(model="m", revision="r2", block_size=16)
    second = await check(service, chat(LONG), other)
    assert set(first[0].chain).isdisjoint(second[0].chain)
    report = LoadReport(pod="p", address="a", epoch="e", time=1, model="m", revision="r", block_size=16)
    assert service.chain(second[0], report) == first[0].chain
    wider = PrefixChain(model="m", revision="r", block_size=64)
    await check(service, chat(LONG), wider)


async def test_many_requests_for_one_new_text_tokenize_it_once(service):
    answers = await asyncio.gather(*(service.prompts(chat(LONG), IDENTITY) for _ in range(20)))
    assert len({tuple(answer[0].ids) for answer in answers}) == 1
    assert service.counts.encoded <= answers[0][0].num_tokens
    assert not service._encoder._encoding


async def test_a_client_that_leaves_does_not_take_the_work_from_others(service):
    request = chat(LONG)
    leaver = asyncio.create_task(service.prompts(request, IDENTITY))
    await asyncio.sleep(0)  # it runs up to where it waits for a thread
    assert service._encoder._encoding
    stayer = asyncio.create_task(service.prompts(request, IDENTITY))
    await asyncio.sleep(0)
    leaver.cancel()
    (found,) = await stayer
    assert found.ids.tolist() == as_the_engine_does(service, request)[0]
    assert leaver.cancelled()


async def test_memory_is_bounded_and_answers_stay_right(tokenizer):
    service = serve(tokenizer, memo_bytes=30_000, chain_memo_bytes=30_000, prompt_memo_bytes=20_000)
    for turn in range(30):
        await check(service, chat(f"{turn} {LONG[: 400 * (turn % 7)]}", "ok", "go on"))
        assert service.memo_bytes <= 80_000
    service.close()


async def test_a_prompt_that_can_never_fit_is_not_tokenized(service):
    (found,) = await service.prompts(chat("x" * 3_000_000), IDENTITY, max_model_len=8192)
    assert found.ids is None
    assert found.chain == []
    assert found.num_tokens >= 8192
    assert service.counts.encoded == 0


async def test_a_truncated_prompt_keeps_its_last_tokens(service):
    prompt = chat("one two three four five six", "seven", "eight nine")
    (whole,) = as_the_engine_does(service, prompt)
    for count, kept in ((3, 3), (len(whole) + 5, len(whole)), (-1, 40 - 7)):
        cut = chat(
            "one two three four five six", "seven", "eight nine", truncate_prompt_tokens=count, max_tokens=7
        )
        assert service.at_once(cut, IDENTITY) is None
        (found,) = await service.prompts(cut, IDENTITY, max_model_len=40)
        assert found.ids.tolist() == whole[-kept:]
        assert found.chain == [short(block) for block in chain(IDENTITY.namespace(), whole[-kept:])]


async def test_a_callers_mistake_is_the_engines_error(service):
    with pytest.raises(RequestError, match="Unicode"):
        await service.prompts(TokenizeRequest(messages=[UserMessage(content="\ud800")]), IDENTITY)
    with pytest.raises(RequestError, match="Unicode"):
        await service.prompts(TokenizeRequest(messages=[UserMessage(content=LONG + "\ud800")]), IDENTITY)
    assert not service._encoder._encoding
    with pytest.raises(RequestError, match="add_generation_prompt"):
        await service.prompts(chat("a", continue_final_message=True, add_generation_prompt=True), IDENTITY)


async def test_long_conversations_do_not_block_the_loop_and_come_out_right(service):
    await check(service, chat(*(f"message {i}: {LONG[:200]}" for i in range(201))))


def test_ids_are_an_array_of_uint32(service):
    (found,) = asyncio.run(service.prompts(chat("Hi"), IDENTITY))
    assert isinstance(found.ids, array)
    assert found.ids.typecode == "I"


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelNotFound):
        TokenService.load(tmp_path / "nothing")


def test_a_load_report_and_a_model_card_name_the_same_namespace():
    report = LoadReport(pod="p", address="a", epoch="e", time=1, model="m", revision="r", block_size=16)
    wanted = ChainNamespace(model="m", revision="r", cache_salt="s", adapter="x", block_size=16)
    assert report.namespace(cache_salt="s", adapter="x") == wanted
    assert IDENTITY.namespace(cache_salt="s", adapter="x") == wanted
    with pytest.raises(ValueError, match="format"):
        PrefixChain(format="other", model="m", revision="r", block_size=16).namespace()


async def test_a_short_chat_that_comes_again_is_known_without_rendering_it(service, monkeypatch):
    first = service.at_once(chat("Hi", "Hello.", "What is the capital of France?"), IDENTITY)
    monkeypatch.setattr(service.renderer, "render", None)
    again = service.at_once(chat("Hi", "Hello.", "What is the capital of France?"), IDENTITY)
    assert again is first is not None
    assert service.at_once(chat("Hi", "Hello.", "What is the capital of France?", seed=5), IDENTITY) is first


async def test_a_chat_that_differs_in_anything_the_prompt_depends_on_is_another(service):
    first = service.at_once(chat("Hi"), IDENTITY)
    others = [
        chat("hi"),
        chat("Hi", "Hi"),
        chat("Hi", add_generation_prompt=False),
        chat("Hi", cache_salt="tenant"),
        chat("Hi", chat_template_kwargs={"enable_thinking": True}),
    ]
    found = [first, *[service.at_once(other, IDENTITY) for other in others]]
    assert None not in found
    assert len({id(prompt) for prompt in found}) == len(found)


@pytest.mark.parametrize("family", ["smollm", "llama3", "qwen", "sentencepiece"])
def test_a_short_chat_is_tokenized_on_the_spot_as_the_engine_does_it(tokenizers_by_family, family):
    service = serve(tokenizers_by_family[family], memo_bytes=20_000)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(contents=st.lists(messages.map(" ".join) | sentences, min_size=1, max_size=4))
    def asked(contents: list[str]) -> None:
        request = chat(*contents)
        try:
            (expected,) = as_the_engine_does(service, request)
        except RequestError:
            return
        prompt = service.at_once(request, IDENTITY)
        assert prompt is not None
        assert prompt.ids.tolist() == expected
        assert prompt.chain == [short(block) for block in chain(IDENTITY.namespace(), expected)]

    asked()
    service.close()


async def test_what_may_take_longer_is_not_done_on_the_spot(service):
    assert service.at_once(chat(LONG), IDENTITY) is None
    assert service.at_once(chat("Hi", resume_token_ids=[5]), IDENTITY) is None
    assert service.at_once(CompletionRequest(prompt="Hi"), IDENTITY) is None


async def test_a_template_that_reads_the_clock_is_rendered_every_time(tokenizer):
    renderer = ChatRenderer({"default": "{{ strftime_now('%f') }}{{ messages[0].content }}"}, {})
    service = TokenService(tokenizer, renderer)
    first = service.at_once(chat("Hi"), IDENTITY)
    assert service.at_once(chat("Hi"), IDENTITY) is not first
    service.close()


async def test_a_template_that_makes_gigabytes_of_some_messages_is_a_400(tokenizer):
    greedy = "{{ messages[0].content * (10**9 if messages[0].content == 'many' else 1) }}"
    service = TokenService(tokenizer, ChatRenderer({"default": greedy}, {}))
    assert (await service.prompts(chat("few"), IDENTITY))[0].num_tokens == 1
    with pytest.raises(RequestError, match="chat template was stopped") as caught:
        service.at_once(chat("many"), IDENTITY)
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="chat template was stopped"):
        await service.prompts(chat("many"), IDENTITY)
    service.close()
