"""How requests end (stop ids, lengths, abort, timeouts), what outputs tell, and what the cache keeps."""

from __future__ import annotations

import pytest
from core_sim import Loop, expected, request

from leadline.engine.errors import RequestError
from leadline.engine.messages import Failure

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def free_run(prompt: list[int], count: int) -> list[int]:
    """What the model says after `prompt` when nothing stops it."""
    return expected(request("free", prompt, max_tokens=count), 10_000)[0]


def first_seen(tokens: list[int], at_least: int) -> int:
    """Index >= at_least of a token that did not occur before."""
    return next(i for i in range(at_least, len(tokens)) if tokens[i] not in tokens[:i])


@DEPTHS
@pytest.mark.parametrize("kind", ["eos_token_ids", "stop_token_ids"])
def test_a_stop_token_ends_the_request_and_is_its_last_token(kind: str, depth: int) -> None:
    free = free_run([1, 2, 3], 30)
    at = first_seen(free, 4)
    loop = Loop(50, depth=depth)
    loop.add(request("r", [1, 2, 3], max_tokens=30, **{kind: (99, free[at])}))
    loop.run()
    final = loop.final["r"]
    assert loop.tokens["r"] == free[: at + 1]
    assert (final.finish_reason, final.stop_token_id) == ("stop", free[at])


@DEPTHS
def test_min_tokens_holds_stop_tokens_back_and_names_them_to_the_runner(depth: int) -> None:
    free = free_run([1, 2, 3], 30)
    loop = Loop(50, depth=depth)
    loop.add(
        request("r", [1, 2, 3], max_tokens=30, min_tokens=9, eos_token_ids=(free[2],), stop_token_ids=(5,))
    )
    plan = loop.step()
    assert plan is not None
    assert set(plan.entered[0].banned_until_min) == {free[2], 5}
    loop.run()
    assert len(loop.tokens["r"]) > 9
    assert free[2] not in loop.tokens["r"][:9]
    loop.check_exact()


def test_a_stop_token_before_min_tokens_is_ignored_even_if_the_runner_samples_it() -> None:
    free = free_run([1, 2, 3], 8)
    loop = Loop(50)
    loop.add(request("r", [1, 2, 3], max_tokens=8, min_tokens=4, stop_token_ids=(free[1],)))
    plan = loop.scheduler.schedule(0.0)
    assert plan is not None
    plan.entered[0].banned_until_min = ()
    loop.flights.append(plan)
    loop.read()
    loop.step()
    assert loop.tokens["r"] == free[:2]
    assert "r" not in loop.final


@DEPTHS
def test_no_row_is_planned_beyond_max_tokens(depth: int) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("r", [1, 2, 3], max_tokens=5))
    loop.run()
    assert loop.runner.computed_tokens == 3 + 4


@DEPTHS
def test_a_resumed_request_counts_earlier_output_as_output(depth: int) -> None:
    free = free_run([1, 2, 3], 10)
    loop = Loop(50, depth=depth)
    loop.add(request("r", [1, 2, 3, *free[:4]], max_tokens=10, num_resumed=4))
    loop.run()
    assert loop.tokens["r"] == free[4:]
    with pytest.raises(RequestError, match="4 tokens exist already"):
        loop.add(request("done", [1, 2, 3, *free[:4]], max_tokens=4, num_resumed=4))


def test_a_request_id_in_use_is_refused() -> None:
    loop = Loop(50)
    loop.add(request("r", [1]))
    with pytest.raises(RequestError, match="already in use"):
        loop.scheduler.add(request("r", [2]), 0.0)


@DEPTHS
def test_a_request_that_is_aborted_frees_its_blocks_at_once_and_nobody_notices(depth: int) -> None:
    loop = Loop(50, depth=depth)
    for i in range(4):
        loop.add(request(f"r{i}", [i + 1] * 9, max_tokens=20))
    for _ in range(4):
        loop.step()
    used = loop.scheduler.stats().blocks_used
    loop.abort("r1")
    assert loop.scheduler.stats().blocks_used < used
    assert not loop.scheduler.abort("r1")
    loop.run()
    loop.check_exact()
    assert len(loop.tokens["r1"]) < 20


def test_waiting_and_preempted_requests_can_be_aborted() -> None:
    loop = Loop(6, depth=1, max_concurrent_requests=2)
    for i in range(3):
        loop.add(request(f"r{i}", [i + 1] * 4, max_tokens=20))
    loop.abort("r2")
    while not loop.scheduler.stats().preemptions_total:
        loop.step()
    loop.abort("r1")
    loop.run()
    assert loop.final["r1"].num_preemptions == 1
    loop.check_exact()


def test_a_request_that_waits_too_long_ends_with_queue_timeout() -> None:
    loop = Loop(50, max_concurrent_requests=1, queue_timeout=9.0)
    loop.add(request("running", [1, 2], max_tokens=30))
    loop.add(request("own limit", [3, 4], queue_timeout=2.0))
    loop.add(request("default limit", [5, 6]))
    loop.step()
    loop.now = 2.0
    loop.step()
    assert loop.final["own limit"].finish_reason == "queue_timeout"
    assert "default limit" not in loop.final
    loop.now = 9.0
    loop.step()
    assert loop.final["default limit"].finish_reason == "queue_timeout"
    loop.run()
    assert loop.final["running"].finish_reason == "length", "a queue timeout does not touch what was admitted"
    assert loop.scheduler.stats().timeouts_total == 2


def test_a_queue_timeout_of_zero_asks_for_room_in_the_next_step() -> None:
    loop = Loop(50, max_concurrent_requests=1)
    loop.now = 1.0  # later than it arrived, as on its way from another process
    loop.add(request("first", [1, 2], max_tokens=5, queue_timeout=0.0))
    loop.step()
    loop.add(request("no room", [3, 4], queue_timeout=0.0))
    loop.step()
    loop.step()
    assert loop.final["no room"].finish_reason == "queue_timeout"
    loop.run()
    assert loop.final["first"].finish_reason == "length"
    loop.check_exact()


@DEPTHS
def test_a_deadline_ends_a_request_whether_it_runs_or_waits(depth: int) -> None:
    loop = Loop(50, depth=depth, max_concurrent_requests=1)
    loop.add(request("running", [1, 2], max_tokens=300, deadline=5.0))
    loop.add(request("waiting", [3, 4], deadline=4.0))
    loop.add(request("patient", [5, 6], max_tokens=4))
    for _ in range(5):
        loop.now += 1.0
        loop.step()
    assert loop.final["running"].finish_reason == loop.final["waiting"].finish_reason == "deadline"
    assert loop.tokens["running"]
    assert not loop.tokens["waiting"]
    loop.run()
    loop.check_exact()


def test_the_first_output_tells_how_long_the_request_was_queued() -> None:
    loop = Loop(50, max_concurrent_requests=1)
    loop.add(request("a", [1, 2], max_tokens=2))
    loop.add(request("b", [1, 2], max_tokens=2))
    loop.step()
    loop.step()
    loop.now = 3.0
    loop.run()
    assert [output.queue_seconds for output in loop.outputs["a"]] == [0.0, None]
    assert [output.queue_seconds for output in loop.outputs["b"]] == [3.0, None]


@DEPTHS
def test_structured_output_waits_for_its_last_token_and_others_do_not(depth: int) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("structured", [1, 2, 3], max_tokens=6, structured=True))
    loop.add(request("plain", [4, 5, 6], max_tokens=30))
    seen = False
    while loop.scheduler.has_work() or loop.flights:
        loop.step()  # checks that no structured row is planned while a token of it is unread
        seen = seen or loop.scheduler.needs_sync
    assert seen == (depth > 0)
    assert len(loop.runner.rows_log) == 30, "one token of the plain request in every step"
    loop.check_idle()
    loop.check_exact()


@DEPTHS
def test_a_request_that_is_held_waits_for_its_grammar_and_counts_as_waiting(depth: int) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("held", [1, 2, 3], max_tokens=4, structured=True), held=True)
    loop.add(request("plain", [4, 5, 6], max_tokens=8))
    for _ in range(4):
        loop.step()
    assert (loop.tokens["held"], loop.scheduler.stats().waiting) == ([], 1)
    loop.scheduler.unblock("held")
    loop.run()
    loop.check_idle()
    loop.check_exact()


@DEPTHS
@pytest.mark.parametrize("end", ["abort", "fail", "timeout"])
def test_a_request_that_is_held_can_end(depth: int, end: str) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("held", [1, 2, 3], max_tokens=4, structured=True, queue_timeout=5.0), held=True)
    loop.add(request("plain", [4, 5, 6], max_tokens=8))
    loop.step()
    if end == "abort":
        while loop.flights:
            loop.read()
        loop.abort("held")
    elif end == "fail":
        loop.scheduler.fail("held", Failure("RequestError", "no such grammar", code="invalid_grammar"))
    else:
        loop.now = 6.0
    loop.run()
    final = loop.final["held"]
    assert final.finish_reason == {"abort": "abort", "fail": "error", "timeout": "queue_timeout"}[end]
    if end == "fail":
        assert (final.error, final.failure.code) == ("no such grammar", "invalid_grammar")
    loop.scheduler.unblock("held")  # an answer that comes too late
    loop.check_idle()


@DEPTHS
def test_a_request_without_its_mask_sits_out_while_others_go_on(depth: int) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("structured", [1, 2, 3], max_tokens=6, structured=True))
    loop.add(request("plain", [4, 5, 6], max_tokens=12))
    for _ in range(3):
        loop.step()
    loop.scheduler.block("structured")
    while loop.flights:
        loop.read()
    had, others = len(loop.tokens["structured"]), len(loop.tokens["plain"])
    for _ in range(4):
        loop.step()
    while loop.flights:
        loop.read()
    assert len(loop.tokens["structured"]) == had
    assert len(loop.tokens["plain"]) == others + 4
    loop.scheduler.unblock("structured")
    loop.run()
    loop.check_idle()
    loop.check_exact()


def test_a_preempted_request_computes_its_prompt_again_and_samples_once_it_has_its_mask() -> None:
    loop = Loop(8, block_size=4, max_concurrent_requests=2)
    loop.add(request("old", [4, 5, 6], max_tokens=24))
    loop.add(request("structured", [1, 2, 3], max_tokens=20, structured=True))
    while not loop.scheduler.stats().preemptions_total:
        loop.step()
    loop.scheduler.block("structured")
    had = len(loop.tokens["structured"])
    while "old" not in loop.final:
        loop.step()
    for _ in range(4):
        loop.step()
    assert len(loop.tokens["structured"]) == had
    loop.scheduler.unblock("structured")
    loop.run()
    loop.check_idle()
    loop.check_exact()


@DEPTHS
def test_salts_keep_prefixes_apart(depth: int) -> None:
    loop = Loop(50, depth=depth)
    for i, salt in enumerate((0, 1, 0)):
        loop.add(request(f"r{i}", [7] * 9, salt=salt, max_tokens=1))
        loop.run()
    assert [loop.final[f"r{i}"].num_cached_tokens for i in range(3)] == [0, 0, 8]
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (27, 8)


@DEPTHS
@pytest.mark.parametrize("count", [9, 10, 11, 12])
def test_output_blocks_are_hit_by_the_next_turn_of_a_conversation(count: int, depth: int) -> None:
    loop = Loop(50, depth=depth)
    loop.add(request("turn 1", [7] * 6, max_tokens=count))
    loop.run()
    loop.add(request("turn 2", [7] * 6 + loop.tokens["turn 1"] + [8, 8], max_tokens=2))
    loop.run()
    # The KV of turn 1's last token was never computed, so that block is not there even if it is full.
    assert loop.final["turn 2"].num_cached_tokens == (6 + count - 1) // 4 * 4
    loop.check_exact()


def test_without_prefix_caching_nothing_is_hit_and_nothing_stays() -> None:
    loop = Loop(50, prefix_caching=False)
    for name in ("a", "b"):
        loop.add(request(name, [7] * 9))
        loop.run()
    assert loop.final["b"].num_cached_tokens == 0
    assert loop.scheduler.stats().blocks_cached == 0


def test_resetting_the_prefix_cache_makes_the_next_request_compute_everything() -> None:
    loop = Loop(50)
    loop.add(request("a", [7] * 9, max_tokens=1))
    loop.run()
    assert loop.scheduler.reset_prefix_cache() == 2
    assert loop.scheduler.stats().blocks_free == 50
    loop.add(request("b", [7] * 9, max_tokens=1))
    loop.run()
    assert loop.final["b"].num_cached_tokens == 0


def test_results_out_of_order_are_refused() -> None:
    loop = Loop(50, depth=2)
    loop.add(request("a", [7] * 9))
    first, second = loop.scheduler.schedule(0.0), loop.scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    result = loop.runner.execute(first)
    with pytest.raises(RuntimeError, match="oldest step in flight"):
        loop.scheduler.update(second, result, 0.0)
