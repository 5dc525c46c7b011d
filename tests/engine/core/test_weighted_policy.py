"""Two classes share the prefill budget in proportion, without starvation, FIFO within a class."""

from __future__ import annotations

import pytest
from core_sim import Loop, request
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.core import WeightedPolicy


def prompt(index: int, length: int) -> list[int]:
    """Prompts that share no block."""
    return [index % 39 + 1, index // 39 % 39 + 1] + [3] * (length - 2)


def prefill_tokens(loop: Loop, kinds: dict[int, str]) -> dict[str, int]:
    got = {"interactive": 0, "batch": 0}
    for rows in loop.runner.rows_log:
        for seq_id, _, count, _ in rows:
            got[kinds[seq_id]] += count
    return got


@pytest.mark.parametrize(("weights", "share"), [((4.0, 1.0), 0.8), ((1.0, 1.0), 0.5), ((1.0, 3.0), 0.25)])
def test_classes_that_always_have_work_get_tokens_in_proportion_to_their_weights(
    weights, share: float
) -> None:
    policy = WeightedPolicy(dict(zip(("interactive", "batch"), weights, strict=True)))
    loop = Loop(4000, policy=policy, max_num_batched_tokens=100, max_concurrent_requests=4)
    kinds = {}
    for i in range(400):
        kinds[i] = "batch" if i < 200 else "interactive"
        loop.add(request(f"r{i}", prompt(i, 40), max_tokens=1, priority_class=kinds[i]))
    for _ in range(60):
        loop.step()
    got = prefill_tokens(loop, kinds)
    assert got["interactive"] / sum(got.values()) == pytest.approx(share, abs=0.05)


def test_a_long_batch_prompt_does_not_delay_an_interactive_one_by_a_step() -> None:
    loop = Loop(4000, max_num_batched_tokens=50)
    loop.add(request("batch", prompt(0, 390), max_tokens=1, priority_class="batch"))
    loop.step()
    loop.add(request("interactive", prompt(1, 30), max_tokens=5))
    loop.step()
    assert len(loop.tokens["interactive"]) == 1
    assert loop.runner.rows_log[-1][-1][2] > 0
    assert sum(count for _, _, count, _ in loop.runner.rows_log[-1]) == 50, "the batch prompt gets the rest"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("blocks", "prompt_len", "output"), [(60, 20, 60), (40, 20, 60), (80, 60, 40)])
def test_under_lasting_pressure_each_class_keeps_its_share_of_the_tokens(
    blocks: int, prompt_len: int, output: int, depth: int
) -> None:
    """Eight slots, of which the pool holds two to four whole sequences. The batch class once got 3 %."""
    loop = Loop(blocks, depth=depth, max_concurrent_requests=8, max_queued_requests=1000)
    kinds: dict[str, str] = {}
    steps = 700
    for _ in range(steps):
        waiting = loop.scheduler.stats().waiting_by_class
        for kind in ("interactive", "batch"):
            if waiting.get(kind, 0) < 4:
                for _ in range(4):
                    name = f"r{len(kinds)}"
                    kinds[name] = kind
                    words = prompt(len(kinds), prompt_len)
                    loop.add(request(name, words, salt=len(kinds), max_tokens=output, priority_class=kind))
        loop.step()
    assert loop.scheduler.stats().preemptions_total > 20
    got = {"interactive": 0, "batch": 0}
    for name, tokens in loop.tokens.items():
        got[kinds[name]] += len(tokens)
    assert 0.15 <= got["batch"] / sum(got.values()) <= 0.25
    loop.check_exact()
    loop.run()  # and what is left comes to its end


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=40),
    st.integers(32, 60),
    st.integers(0, 2),
)
def test_no_mix_of_classes_under_pressure_keeps_a_request_from_its_end(
    requests: list[tuple[int, int, bool]], blocks: int, depth: int
) -> None:
    loop = Loop(blocks, depth=depth, max_queued_requests=1000)
    for i, (length, output, batch) in enumerate(requests):
        kind = "batch" if batch else "interactive"
        loop.add(request(f"r{i}", prompt(i, length), salt=i, max_tokens=output, priority_class=kind))
    loop.run()
    loop.check_exact()


def test_a_class_alone_gets_the_whole_budget() -> None:
    loop = Loop(4000, max_num_batched_tokens=50)
    loop.add(request("batch", prompt(0, 300), max_tokens=1, priority_class="batch"))
    loop.step()
    assert loop.runner.computed_tokens == 50


@pytest.mark.parametrize("slots", [1, 3])
def test_batch_requests_are_not_starved_by_a_stream_of_interactive_ones(slots: int) -> None:
    loop = Loop(400, max_concurrent_requests=slots, max_queued_requests=10_000)
    loop.add(request("batch", prompt(0, 60), max_tokens=3, priority_class="batch"))
    for i in range(1, 200):
        for copy in range(4):
            loop.add(request(f"i{i}.{copy}", prompt(i * 4 + copy, 30), max_tokens=4))
        loop.step()
        if "batch" in loop.final:
            break
    assert "batch" in loop.final
    assert i < 60


def test_a_batch_prompt_that_needs_most_of_the_pool_is_admitted_in_the_end() -> None:
    loop = Loop(20, max_queued_requests=10_000, max_num_batched_tokens=16)
    loop.add(request("i0", prompt(1, 20), max_tokens=8))
    loop.step()
    loop.add(request("batch", prompt(0, 76), max_tokens=2, priority_class="batch"))
    for i in range(2, 400):
        loop.add(request(f"i{i}", prompt(i, 10), max_tokens=8))
        loop.step()
        if "batch" in loop.final:
            break
    assert loop.final["batch"].finish_reason == "length"


def test_idling_earns_nothing() -> None:
    loop = Loop(4000, max_num_batched_tokens=100, max_concurrent_requests=1)
    for i in range(100):
        loop.add(request(f"i{i}", prompt(i, 50), max_tokens=1))
    for _ in range(50):
        loop.step()
    for i in range(100, 150):
        loop.add(request(f"b{i}", prompt(i, 50), max_tokens=1, priority_class="batch"))
    for _ in range(20):
        loop.step()
    served = sum(name.startswith("b") for name in loop.final)
    assert 2 <= served <= 8


def test_a_class_that_could_not_use_its_share_does_not_monopolise_the_slots_later() -> None:
    policy = WeightedPolicy({"interactive": 1.0, "batch": 1.0})
    sizes = {"max_concurrent_requests": 4, "max_num_batched_tokens": 100, "max_model_len": 4000}
    loop = Loop(4000, policy=policy, prefill_chunk=10, max_queued_requests=10_000, **sizes)
    loop.add(request("one chunk a step", prompt(0, 2000), max_tokens=1))
    for i in range(1, 1000):
        loop.add(request(f"b{i}", prompt(i, 10), max_tokens=1, priority_class="batch"))
    while "one chunk a step" not in loop.final:
        loop.step()
    before = len(loop.final)
    for i in range(1000, 1400):
        loop.add(request(f"i{i}", prompt(i, 10), max_tokens=1))
    for _ in range(40):
        loop.step()
    assert any(name.startswith("b") for name in list(loop.final)[before:])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(2, 30)), min_size=1, max_size=30), st.integers(1, 4))
def test_within_a_class_requests_are_admitted_in_the_order_of_arrival(arrivals, slots: int) -> None:
    loop = Loop(400, max_concurrent_requests=slots, max_num_batched_tokens=32)
    kinds = []
    for i, (batch, length) in enumerate(arrivals):
        kinds.append("batch" if batch else "interactive")
        loop.add(request(f"r{i}", prompt(i, length), max_tokens=2, priority_class=kinds[-1]))
    loop.run()
    first: dict[int, int] = {}
    for step, rows in enumerate(loop.runner.rows_log):
        for seq_id, *_ in rows:
            first.setdefault(seq_id, step)
    for kind in ("batch", "interactive"):
        order = [first[i] for i in range(len(kinds)) if kinds[i] == kind]
        assert order == sorted(order)
