"""Metrics of several API processes added up."""

from __future__ import annotations

import random

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from leadline.engine.outputs import OutputDelta
from leadline.engine.server.metrics.exposition import Family, added, snapshot
from leadline.engine.server.metrics.metrics import Metrics, RequestTimer


def observe(metrics: list[Metrics], seed: int) -> None:
    """The same requests, dealt out over `metrics`."""
    rng = random.Random(seed)
    for number in range(40):
        endpoint = rng.choice(["chat", "completions"])
        with RequestTimer(metrics[number % len(metrics)], endpoint) as timer:
            for _ in range(rng.randint(1, 5)):
                timer.delta(OutputDelta(f"r{number}", 0, token_ids=[1], num_prompt_tokens=7))
            timer.finish(rng.choice(["stop", "length"]))


def values(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All but what depends on the clock."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith(("_sum", "_bucket"))
    }


def test_what_several_counted_is_what_one_would_have_counted() -> None:
    alone, several = Metrics(lambda: None), [Metrics(lambda: None) for _ in range(3)]
    observe([alone], 1)
    observe(several, 1)
    others = added([snapshot(metrics.counted) for metrics in several[1:]])
    # As it crosses between processes.
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(others), type=list[Family])
    page = several[0].render(crossed)
    assert values(page) == values(alone.render())
    assert page.count(b"# TYPE leadline_engine_requests_total counter") == 1


def test_buckets_of_histograms_add_up_and_stay_in_order() -> None:
    several = [Metrics(lambda: None) for _ in range(2)]
    for metrics, seconds in zip(several, (0.004, 0.3), strict=True):
        metrics.queue.observe(seconds)
    page = several[0].render(snapshot(several[1].counted)).decode()
    buckets = [line for line in page.splitlines() if line.startswith("leadline_engine_queue_seconds_bucket")]
    counts = [float(line.rsplit(" ", 1)[1]) for line in buckets]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0.0, 2.0)
    assert 'le="0.005"} 1.0' in "\n".join(buckets)


def test_nothing_added_is_the_page_of_one() -> None:
    metrics = Metrics(lambda: None)
    observe([metrics], 2)
    assert metrics.render([]) == metrics.render()
