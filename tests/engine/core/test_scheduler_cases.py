"""Known failures the scheduler answers for: E3 E4 E6 E7 E8 E9 E12 E13 E18 E20 E21 E22, each by its number."""

from __future__ import annotations

import itertools

import pytest
from core_sim import EOS, Loop, request

from leadline.engine.core import LengthAwareEviction, LRUEviction
from leadline.engine.errors import QueueFull, RequestError

PROMPT = [(5 * i) % 37 + 1 for i in range(40)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("length", [7, 8, 9, 12])
def test_e6_a_fully_cached_prompt_computes_its_last_token_again(length: int, depth: int) -> None:
    loop = Loop(50, depth=depth)
    for name in ("first", "second"):
        loop.add(request(name, PROMPT[:length]))
        loop.run()
    assert loop.tokens["first"] == loop.tokens["second"]
    assert loop.final["first"].num_cached_tokens == 0
    assert loop.final["second"].num_cached_tokens == (length - 1) // 4 * 4
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [None, 4, 5])
def test_e7_a_new_prefix_shared_in_flight_is_computed_once(chunk: int | None, depth: int) -> None:
    loop = Loop(60, depth=depth, prefill_chunk=chunk)
    for name, tail in (("a", [1]), ("b", [2]), ("c", [3, 4])):
        loop.add(request(name, PROMPT[:32] + tail, max_tokens=1))
    loop.run()
    assert loop.runner.computed_tokens == 33 + 1 + 2
    assert loop.final["b"].num_cached_tokens == loop.final["c"].num_cached_tokens == 32
    loop.check_exact()


def test_e7_one_who_waits_for_a_prefix_does_not_block_those_behind() -> None:
    loop = Loop(60, prefill_chunk=4)
    loop.add(request("owner", PROMPT[:32]))
    loop.add(request("waiter", PROMPT[:33]))
    loop.add(request("other", [30, 31]))
    loop.step()
    assert loop.scheduler.stats().parked == 1
    assert len(loop.tokens["other"]) == 1
    loop.run()
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e7_one_who_waits_for_a_prefix_goes_on_when_its_owner_is_gone(depth: int) -> None:
    loop = Loop(60, depth=depth, prefill_chunk=4)
    loop.add(request("owner", PROMPT[:32]))
    loop.add(request("waiter", PROMPT[:33]))
    loop.step()
    loop.step()
    loop.abort("owner")
    assert loop.scheduler.stats().parked == 0
    loop.run()
    assert loop.final["waiter"].num_cached_tokens == 8
    loop.check_exact()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("eviction", [LRUEviction, LengthAwareEviction])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [6, 7, 8, 11])
def test_e8_preemption_is_invisible_in_the_output(
    num_blocks: int, depth: int, eviction: type, caching: bool
) -> None:
    loop = Loop(num_blocks, depth=depth, eviction=eviction(), prefix_caching=caching)
    for i in range(6):
        loop.add(
            request(
                f"r{i}", PROMPT[: 4 + i], max_tokens=12, priority_class="batch" if i % 2 else "interactive"
            )
        )
    loop.run()
    assert loop.scheduler.stats().preemptions_total > 0
    loop.check_exact()


def test_e8_the_latest_batch_sequence_is_preempted_first() -> None:
    loop = Loop(6)
    for name, priority in (("i1", "interactive"), ("b1", "batch"), ("b2", "batch"), ("i2", "interactive")):
        loop.add(request(name, PROMPT[:4], max_tokens=9, salt=len(loop.requests), priority_class=priority))
    while not (stats := loop.scheduler.stats()).preemptions_total:
        loop.step()
    assert stats.waiting_by_class.get("interactive", 0) == 0
    loop.run()
    assert loop.final["b2"].num_preemptions > 0
    assert loop.final["i1"].num_preemptions == 0
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e8_what_a_preemption_frees_does_not_go_to_a_newcomer(depth: int) -> None:
    loop = Loop(4, depth=depth)
    loop.add(request("first", [1] * 5, max_tokens=8))
    loop.add(request("second", [2] * 5, max_tokens=8))
    loop.step()
    loop.add(request("newcomer", [3], max_tokens=1))
    loop.run()
    assert loop.final["second"].num_preemptions == 1
    steps = [[rows[0] for rows in log] for log in loop.runner.rows_log]
    last_of_first = max(i for i, seq_ids in enumerate(steps) if 0 in seq_ids)
    assert min(i for i, seq_ids in enumerate(steps) if 2 in seq_ids) > last_of_first
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_e9_many_short_requests_with_overlap_preemption_and_stop_lose_and_double_nothing(depth: int) -> None:
    loop = Loop(9, depth=depth, max_queued_requests=200)
    for i in range(120):
        loop.add(
            request(
                f"r{i}",
                PROMPT[i % 7 : i % 7 + 1 + i % 11],
                max_tokens=1 + i % 13,
                eos_token_ids=(EOS,),
                stop_token_ids=(3, 4, 5, 6) if i % 2 else (),
            )
        )
    loop.run()
    assert loop.scheduler.stats().preemptions_total > 0
    assert {output.finish_reason for output in loop.final.values()} == {"stop", "length"}
    loop.check_exact()


def test_e12_a_full_queue_is_refused_with_429_and_a_time_to_retry() -> None:
    loop = Loop(50, max_concurrent_requests=2, max_queued_requests=3)
    for i in range(5):
        loop.add(request(f"r{i}", PROMPT[:4]))
    with pytest.raises(QueueFull, match="max_queued_requests") as caught:
        loop.add(request("one too many", PROMPT[:4]))
    assert caught.value.status == 429
    assert caught.value.retry_after > 0
    loop.run()
    loop.add(request("later", PROMPT[:4]))
    loop.run()
    loop.check_exact()


def test_e12_a_prompt_that_can_never_fit_the_pool_is_refused_with_both_numbers() -> None:
    loop = Loop(5)
    with pytest.raises(RequestError, match=r"21 tokens.* holds 20 \(5 blocks of 4 tokens\)") as caught:
        loop.add(request("long", PROMPT[:21]))
    assert caught.value.status == 400
    loop.add(request("just fits", PROMPT[:20]))
    loop.run()
    assert (len(loop.tokens["just fits"]), loop.final["just fits"].finish_reason) == (1, "length")
    loop.check_exact()


def test_e3_a_prompt_as_long_as_the_context_is_refused_and_one_less_gives_one_token() -> None:
    loop = Loop(50, max_model_len=10)
    with pytest.raises(RequestError, match="10 tokens"):
        loop.add(request("too long", PROMPT[:10]))
    loop.add(request("one less", PROMPT[:9]))
    loop.run()
    assert (len(loop.tokens["one less"]), loop.final["one less"].finish_reason) == (1, "length")


def test_e4_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one token"):
        Loop(5).add(request("empty", []))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e13_prompt_logprobs_are_the_same_the_second_time(depth: int) -> None:
    loop = Loop(60, depth=depth, prefill_chunk=5)
    for name in ("first", "second"):
        loop.add(request(name, PROMPT[:19], prompt_logprobs=1, logprobs=0, max_tokens=3))
        loop.run()
    first, second = (
        [entry for output in loop.outputs[name] for entry in output.prompt_logprobs or ()]
        for name in ("first", "second")
    )
    assert [entry.token_id for entry in first] == PROMPT[1:19]
    assert first == second
    assert all(len(output.logprobs) == 1 for output in loop.outputs["second"])
    loop.add(request("third", PROMPT[:19], max_tokens=3))
    loop.run()
    assert loop.final["third"].num_cached_tokens == 16, "they are still written to the cache"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e13_prompt_logprobs_survive_preemption(depth: int) -> None:
    half_way = complete = 0
    for num_blocks, chunk in itertools.product((6, 7, 8, 9), (1, 2, 8)):
        loop = Loop(num_blocks, depth=depth, prefill_chunk=chunk)
        for i in range(4):
            loop.add(request(f"r{i}", PROMPT[i : i + 9], prompt_logprobs=1, max_tokens=11))
            loop.step()
        loop.run()
        for i in range(4):
            name = f"r{i}"
            told = [entry.token_id for output in loop.outputs[name] for entry in output.prompt_logprobs or ()]
            assert told == PROMPT[i + 1 : i + 9]
            first = loop.outputs[name][0]
            half_way += first.num_preemptions > 0
            complete += loop.final[name].num_preemptions > first.num_preemptions
        loop.check_exact()
    assert half_way
    assert complete


@pytest.mark.parametrize("depth", [0, 1])
def test_e18_many_samples_of_one_prompt_prefill_it_once_and_share_its_blocks(depth: int) -> None:
    loop = Loop(60, depth=depth, max_concurrent_requests=32, max_num_batched_tokens=64)
    for i in range(32):
        loop.add(request(f"r{i}", PROMPT[:33], max_tokens=2))
    loop.step()
    loop.step()
    loop.step()
    loop.run()
    # The eight full blocks once, then one token of prompt and one of output each.
    assert loop.runner.computed_tokens == 32 + 32 * 2
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e20_running_streams_get_a_token_in_every_step_however_many_long_prompts_arrive(depth: int) -> None:
    loop = Loop(2000, depth=depth, max_concurrent_requests=32, max_num_batched_tokens=32)
    streams = [loop.add(request(f"stream{i}", [30 + i], max_tokens=60)).request_id for i in range(3)]
    while any(not loop.tokens[name] for name in streams):
        loop.step()
    steps = len(loop.runner.rows_log)
    for i in range(40):
        loop.add(request(f"long{i}", [i % 30 + 1, *PROMPT, *PROMPT], max_tokens=1))
        loop.step()
    for rows in loop.runner.rows_log[steps:]:
        assert {seq_id for seq_id, _, _, sampled in rows if sampled} >= {0, 1, 2}
        assert sum(count for _, _, count, _ in rows) <= 32
    loop.run()
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_e21_a_lone_sequence_that_outgrows_the_pool_ends_with_length(depth: int) -> None:
    loop = Loop(5, depth=depth)
    loop.add(request("greedy", PROMPT[:6], max_tokens=300))
    loop.run()
    assert loop.final["greedy"].finish_reason == "length"
    assert len(loop.tokens["greedy"]) == 5 * 4 - 6 + 1
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1])
def test_e21_several_that_outgrow_the_pool_together_all_end_with_length(depth: int) -> None:
    loop = Loop(5, depth=depth)
    for i in range(4):
        loop.add(request(f"r{i}", PROMPT[i : i + 3], max_tokens=300))
    loop.run()
    assert [len(loop.tokens[f"r{i}"]) for i in range(4)] == [18] * 4
    loop.check_exact()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 20, 33])
def test_e22_every_batch_size_up_to_the_limit_runs(size: int) -> None:
    loop = Loop(400, max_concurrent_requests=size, max_num_batched_tokens=max(64, size))
    for i in range(size + 3):
        loop.add(request(f"r{i}", [i + 1, i + 2], max_tokens=20))
    loop.run()
    assert max(len(rows) for rows in loop.runner.rows_log) == size
    loop.check_exact()
