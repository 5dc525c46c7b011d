"""`LLM`: strings and token ids in, results in input order, stop strings, several choices, chat, grammars."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch
from exact_prompts import NEW_TOKENS, SHORT

from leadline.engine import LLM, SamplingParams
from leadline.engine.errors import EngineDead, EngineError, RequestError
from leadline.engine.sampling_params import StructuredSpec


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", device="cpu", cpu_kv_bytes=1 << 28, max_model_len=1024, progress=False)


def test_results_come_in_input_order_whatever_the_prompts_are(llm, prompts, reference):
    mixed = [*SHORT[:4], prompts[4], tuple(prompts[20]), prompts[13]]
    outputs = llm.generate(mixed, max_tokens=NEW_TOKENS, temperature=0, use_tqdm=False)
    indices = [0, 1, 2, 3, 4, 20, 13]
    assert [o.outputs[0].token_ids for o in outputs] == [reference.tokens[i] for i in indices]
    assert [o.prompt_token_ids for o in outputs] == [prompts[i] for i in indices]
    assert outputs[0].prompt == SHORT[0]
    assert outputs[4].prompt is None
    assert all(o.total_seconds >= o.first_token_seconds > 0 for o in outputs)


def test_a_single_prompt_may_be_given_bare(llm, prompts, reference):
    (text,) = llm.generate(SHORT[0], max_tokens=5, temperature=0, use_tqdm=False)
    (ids,) = llm.generate(prompts[0], max_tokens=5, temperature=0, use_tqdm=False)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids == reference.tokens[0][:5]


def test_prompts_may_come_out_of_anything_that_holds_them(llm, prompts, reference):
    ids = np.array(prompts[0])
    for given in (ids, list(ids), torch.tensor(prompts[0]), iter(SHORT[:1]), np.array([prompts[0]])):
        (output,) = llm.generate(given, max_tokens=3, temperature=0, use_tqdm=False)
        assert output.outputs[0].token_ids == reference.tokens[0][:3]


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"prompt": "a"}, [None], [b"abc"], [1.5]])
def test_what_is_no_prompt_is_refused_by_its_type(llm, prompts):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("given", [{"max_tokens": 3}, [{"max_tokens": 3}]])
def test_what_is_no_sampling_params_is_refused(llm, given):
    with pytest.raises(RequestError, match="must be SamplingParams") as caught:
        llm.generate(["a"], given, use_tqdm=False)
    assert caught.value.param == "sampling_params"


def test_one_message_is_no_conversation(llm):
    with pytest.raises(RequestError, match="list"):
        llm.chat({"role": "user", "content": "Hi"}, use_tqdm=False)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3, 2)]
    outputs = llm.generate(SHORT[:3], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3, 2]
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    with pytest.raises(RequestError, match="3 prompts and 2 sampling_params"):
        llm.generate(SHORT[:3], params[:2], use_tqdm=False)


def test_a_stop_string_ends_the_text_before_it(llm):
    params = SamplingParams(temperature=0, max_tokens=40, stop=(" 8,",))
    (output,) = llm.generate(["1, 2, 3, 4, 5,"], params, use_tqdm=False)
    assert output.outputs[0].text == " 6, 7,"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == " 8,"
    assert not llm.core.has_work()


def test_n_choices_prefill_once_and_share_their_blocks(llm, prompts):
    """E18."""
    llm.reset_prefix_cache()
    prompt = prompts[23]
    assert len(prompt) == 257
    before = llm.core.stats()
    params = SamplingParams(temperature=1.0, max_tokens=8, n=6, seed=1, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    after = llm.core.stats()
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    assert [choice.index for choice in output.outputs] == list(range(6))
    hits = after.prefix_hit_tokens_total - before.prefix_hit_tokens_total
    assert hits == 5 * 256, "five choices find the first one's four blocks"
    with pytest.raises(RequestError, match="128"):
        llm.generate([prompt], SamplingParams(n=512), use_tqdm=False)


def test_more_prompts_than_the_queue_holds_are_fed_as_room_appears(small_model):
    small = LLM(
        str(small_model),
        device="cpu",
        cpu_kv_bytes=1 << 26,
        max_model_len=256,
        max_concurrent_requests=4,
        max_queued_requests=2,
        progress=False,
    )
    prompts = [[100 + i, 7, 8] for i in range(25)]
    outputs = small.generate(prompts, max_tokens=2, temperature=0, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(len(o.outputs[0].token_ids) >= 1 for o in outputs)


def test_chat_renders_the_models_template(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
        use_tqdm=False,
    )
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_chat_continues_a_message_and_passes_variables_to_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "My name is"}]
    (output,) = llm.chat(messages, max_tokens=1, continue_final_message=True, use_tqdm=False)
    assert output.prompt.endswith("<|im_start|>assistant\nMy name is")
    with pytest.raises(RequestError, match="must not set 'messages'"):
        llm.chat(messages, chat_template_kwargs={"messages": []}, use_tqdm=False)


def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(llm):
    steps = llm.core.stats().steps_total
    with pytest.raises(RequestError, match="1024"):
        llm.generate([SHORT[0], list(range(10, 1200))], max_tokens=5, use_tqdm=False)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate(SHORT[0], temperature=3.0, use_tqdm=False)
    assert llm.core.stats().steps_total == steps


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    real, calls = llm.core.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SHORT[:4], max_tokens=50, temperature=0, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.core.has_work()
    llm.core.check_integrity()
    assert llm.core.stats().blocks_used == 0


def test_structured_output_follows_its_grammar_beside_free_rows(llm, reference):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = [
        SamplingParams(
            temperature=1.0,
            seed=5,
            max_tokens=80,
            structured=StructuredSpec("json_schema", json.dumps(schema)),
        ),
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=0, max_tokens=20, structured=StructuredSpec("regex", "[a-c]{4}")),
    ]
    outputs = llm.generate(["A person: ", SHORT[0], "abc"], params, use_tqdm=False)
    person = json.loads(outputs[0].outputs[0].text)
    assert person["name"] in ("Ann", "Bob")
    assert isinstance(person["age"], int)
    assert outputs[1].outputs[0].token_ids == reference.tokens[0]
    assert len(outputs[2].outputs[0].text) == 4
    assert set(outputs[2].outputs[0].text) <= set("abc")
    assert all(o.outputs[0].finish_reason == "stop" for o in (outputs[0], outputs[2]))


def test_an_engine_error_reaches_the_caller_as_an_exception(llm, monkeypatch):
    def fail(plan):
        raise ValueError("the device is on fire")

    monkeypatch.setattr(llm.core.runner, "launch", fail)
    with pytest.raises(EngineError, match="the device is on fire"):
        llm.generate(SHORT[:2], max_tokens=5, use_tqdm=False)
    monkeypatch.undo()
    (output,) = llm.generate(SHORT[0], max_tokens=5, temperature=0, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_closing_gives_the_memory_back_while_the_caller_still_holds_the_llm(small_model):
    folder = str(small_model)
    with LLM(folder, device="cpu", cpu_kv_bytes=1 << 26, max_model_len=256, progress=False) as one:
        assert one.generate(SHORT[0], max_tokens=1, temperature=0, use_tqdm=False)
        model, core = weakref.ref(one.core.runner.model), weakref.ref(one.core)
    assert model() is None
    assert core() is None
    with pytest.raises(EngineDead, match="closed"):
        one.generate(SHORT[0], max_tokens=1, use_tqdm=False)
    one.close()
