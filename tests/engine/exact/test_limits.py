"""Lengths, stops, pools that are too small, logprobs, and steps that fail."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from leadline.engine.core.plan import StepPlan
from leadline.engine.errors import ConfigError, EngineDead, OutOfMemory, RequestError
from leadline.engine.models.config import load_model_config
from leadline.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_length(rig, prompts, reference):
    """E21: four blocks of 16 hold 64 tokens, and one more token needs no KV."""
    core = rig.core(block_size=16, num_kv_blocks=4, prefix_caching=False)
    prompt = prompts[0]
    params = SamplingParams(temperature=0, max_tokens=400)
    (tokens,) = rig.run(core, [prompt], params, eos_token_ids=())
    assert len(prompt) + len(tokens) == 65
    assert rig.outputs["0"].finish_reason == "length"
    expected = reference.tokens[0]
    assert tokens[: len(expected) - 1] == expected[:-1]
    with pytest.raises(RequestError, match="whole KV cache holds 64"):
        core.add_request(rig.request("long", list(range(3, 70)), params))


def test_every_id_in_the_eos_list_ends_a_sequence(rig, prompts, reference):
    """E23."""
    third = reference.tokens[0][2]
    assert third not in reference.tokens[0][:2]
    core = rig.core()
    for eos in ((2, third), (third, 2)):
        (tokens,) = rig.run(core, [prompts[0]], GREEDY, eos_token_ids=eos)
        assert tokens == reference.tokens[0][:3]
        assert rig.outputs["0"].finish_reason == "stop"
        assert rig.outputs["0"].stop_token_id == third


def test_min_tokens_bans_every_eos_and_stop_id_until_it_is_reached(rig, prompts, reference):
    first, third = reference.tokens[0][0], reference.tokens[0][2]
    core = rig.core()
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, stop_token_ids=(third,))
    (tokens,) = rig.run(core, [prompts[0]], params, eos_token_ids=(2, first))
    assert not {2, first, third} & set(tokens[:6])
    assert len(tokens) >= 7


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_prompt_logprobs_asked_twice_are_identical(rig, prompts, overlap):
    """E13: the second request finds its blocks cached and must still report on every position."""
    prompt = prompts[19]  # 65 tokens
    assert len(prompt) == 65
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    core = rig.core(block_size=16, overlap=overlap)
    seen = []
    for _ in range(2):
        rig.run(core, [prompt], params)
        logprobs = [entry for output in rig.all_outputs for entry in output.logprobs or []]
        (prompt_logprobs,) = [o.prompt_logprobs for o in rig.all_outputs if o.prompt_logprobs is not None]
        assert [entry.token_id for entry in prompt_logprobs] == prompt[1:]
        assert len(logprobs) == 4
        seen.append((prompt_logprobs, logprobs))
    assert seen[0] == seen[1]


def test_prompt_logprobs_equal_those_computed_directly(rig, prompts):
    prompt = prompts[17]
    params = SamplingParams(temperature=0.9, max_tokens=1, prompt_logprobs=3)
    for chunk in (None, 10):
        core = rig.core(prefill_chunk=chunk)
        rig.run(core, [prompt], params)
        entries = rig.outputs["0"].prompt_logprobs
        with torch.inference_mode():
            expected = torch.log_softmax(_dense_logits(rig.model, prompt), dim=1)
        for position, entry in enumerate(entries):
            row, token = expected[position], prompt[position + 1]
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=2e-3)
            assert entry.rank == int((row > row[token]).sum()) + 1
            assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)


def _dense_logits(model, prompt: list[int]) -> torch.Tensor:
    """Logits of every position with plain causal attention and no cache."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    ids = torch.tensor(prompt)
    return model.compute_logits(model.forward(ids, torch.arange(len(prompt)), attend))


def test_a_pool_too_small_for_the_context_cuts_it_or_says_what_would_fit(rig, local):
    """E28 on CPU."""
    config = load_model_config(local.path)
    block = 2 * config.num_layers * 64 * config.num_kv_heads * config.head_dim * 4
    core = rig.core(max_model_len=None, cpu_kv_bytes=10 * block + 5)
    assert core.max_model_len == 640
    assert core.num_kv_blocks == 10
    with pytest.raises(OutOfMemory, match=r"max_model_len 1,000 .* 640 tokens fit.* cpu_kv_bytes"):
        rig.core(max_model_len=1000, cpu_kv_bytes=10 * block)
    with pytest.raises(OutOfMemory, match="not one block fits"):
        rig.core(max_model_len=None, cpu_kv_bytes=block - 1)
    with pytest.raises(ConfigError, match="8192"):
        rig.core(max_model_len=8193)


class FailingRunner:
    """The real runner, but some launches run out of memory: what a device does at its first long prompt."""

    def __init__(self, runner, fail_at: set[int]) -> None:
        self._runner, self._fail_at, self.launches = runner, fail_at, 0

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan):
        self.launches += 1
        if self.launches in self._fail_at:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return self._runner.launch(plan)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_step_that_runs_out_of_memory_fails_its_requests_and_not_the_engine(
    shallow_rig, prompts, shallow_reference, overlap, fail_at
):
    core = shallow_rig.core(block_size=16, overlap=overlap)
    core.runner = FailingRunner(core.runner, {fail_at})
    some = [0, 4, 15, 19]
    expected = [shallow_reference.tokens[i][:12] for i in some]
    shallow_rig.run(core, [prompts[i] for i in some], GREEDY)
    for output in shallow_rig.outputs.values():
        assert output.finish_reason == "error"
        for name in ("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens"):
            assert name in output.error
    assert shallow_rig.run(core, [prompts[i] for i in some], GREEDY) == expected


def test_an_engine_whose_every_step_fails_gives_itself_up(rig, prompts):
    core = rig.core()
    core.runner = FailingRunner(core.runner, set(range(100)))

    def serve_ten() -> None:
        for i in range(10):
            core.add_request(rig.request(str(i), prompts[0], GREEDY))
            while core.has_work():
                core.step()

    with pytest.raises(EngineDead, match="in a row"):
        serve_ten()
    assert core.runner.launches == 3


def test_the_garbage_collector_is_frozen_after_start_and_runs_when_idle(rig, prompts):
    """E26: a full collection while requests run would walk the whole model and every request."""
    core = rig.core()
    assert gc.get_freeze_count() > 10_000
    assert not core.collect_garbage_if_idle(), "nothing ran yet"
    rig.run(core, [prompts[0]], GREEDY)
    core.add_request(rig.request("busy", prompts[0], GREEDY))
    assert not core.collect_garbage_if_idle(), "not while there is work"
    while core.has_work():
        core.step()
    assert core.collect_garbage_if_idle()
    assert not core.collect_garbage_if_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_is_announced_before_it_is_launched_and_before_it_is_read(rig, prompts, overlap):
    """What finds a step that never ends (docs/decisions/021) goes by this."""
    core, seen = rig.core(overlap=overlap), []
    launch = core.runner.launch

    def launched(plan):
        seen.append(("launch", plan.step_id))
        handle = launch(plan)
        wait = handle.wait

        def waited():
            seen.append(("read", plan.step_id))
            return wait()

        return SimpleNamespace(wait=waited)

    core.runner.launch = launched
    core.on_enter = lambda plan: seen.append(("enter", plan.step_id))
    rig.run(core, [prompts[0], prompts[1]], GREEDY)
    assert len(seen) > 20
    assert all(
        before == ("enter", after[1]) for before, after in itertools.pairwise(seen) if after[0] != "enter"
    )


def test_speeds_are_measured(rig, prompts):
    core = rig.core(prefix_caching=False)
    assert core.speeds().decode_step_seconds == core.speeds().prefill_tokens_per_second == 0.0
    rig.run(core, [prompts[20]], GREEDY)
    assert 1 < core.speeds().prefill_tokens_per_second < 1e7
    assert 1e-4 < core.speeds().decode_step_seconds < 60
