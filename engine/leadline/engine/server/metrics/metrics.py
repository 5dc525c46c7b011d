"""Prometheus metrics of one engine server: `leadline_engine_*`, base units in the names, few labels.

Request metrics are observed here, where requests enter and leave; the core's own counters arrive with its
heartbeat and are read out at scrape time by `_CoreCollector`. Each `Metrics` has registries of its own, so
that several servers in one process (tests) do not collide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import DeadlineExceeded, QueueFull, QueueTimeout, RequestError
from leadline.engine.outputs import OutputDelta
from leadline.engine.server.http.responses import ClientGone
from leadline.engine.server.metrics.exposition import Added, Family, TokenMeter, added, snapshot

__all__ = ["Metrics", "RequestTimer", "outcome_of"]

# A timestamp beside every series, which has no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_QUEUE = (0.001, 0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 60, 120)

EngineState = Callable[[], "tuple[SchedulerStats, Speeds, float, bool] | None"]
"""() → (stats, speeds, heartbeat age in seconds, ready), or None while there is no engine."""


class Metrics:
    def __init__(self, engine_state: EngineState) -> None:
        self._core = CollectorRegistry(auto_describe=True)
        self._core.register(_CoreCollector(engine_state))
        self.counted = CollectorRegistry(auto_describe=True)
        """Counters and histograms of the requests that passed this process."""

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"leadline_engine_{name}", text, labels, registry=self.counted)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"leadline_engine_{name}", text, buckets=buckets, registry=self.counted)

        self.requests = counter(
            "requests", "Requests by endpoint and how they ended.", ("endpoint", "outcome")
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose KV came from the prefix cache.")
        self.stalled_clients = counter(
            "stalled_clients", "Connections closed because the client did not read its answer."
        )
        self.per_token = TokenMeter(_TOKEN)
        self.counted.register(self.per_token)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token, as the server sees it.", _FIRST_TOKEN
        )
        self.per_output_token = histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first, one value a request.",
            _TOKEN,
        )
        self.queue = histogram("queue_seconds", "Arrival to first admission by the scheduler.", _QUEUE)
        self.duration = histogram("request_seconds", "Arrival to last token.", _REQUEST)

    def render(self, others: list[Family] | None = None) -> bytes:
        """`others`: what other API processes counted."""
        counted: Collector = self.counted
        if others is not None:
            counted = Added(added([snapshot(self.counted), others]))
        return generate_latest(self._core) + generate_latest(counted)


class RequestTimer:
    """Follows one request and observes it once, whatever its end. Use as a context manager around its whole
    life: leaving it by an exception decides the outcome unless `finish` already did."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._start = time.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._tokens = 0
        self._seen_prompt: set[str] = set()
        self.outcome: str | None = None

    def __enter__(self) -> RequestTimer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        outcome = self.outcome or outcome_of(error)
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        if self._first is None:
            return
        now = max(self._last.values(), default=self._first)
        self._metrics.duration.observe(now - self._start)
        choices = max(1, len(self._last))
        if self._tokens > choices:
            # Choices run side by side, so the time after the first token is shared by all of them.
            self._metrics.per_output_token.observe((now - self._first) * choices / (self._tokens - choices))

    def delta(self, delta: OutputDelta) -> None:
        metrics, now = self._metrics, time.monotonic()
        if delta.request_id not in self._seen_prompt:
            self._seen_prompt.add(delta.request_id)
            metrics.prompt_tokens.inc(delta.num_prompt_tokens)
            metrics.cached_tokens.inc(delta.num_cached_tokens)
            if delta.queue_seconds is not None:
                metrics.queue.observe(delta.queue_seconds)
        count = len(delta.token_ids)
        if not count:
            return
        if self._first is None:
            self._first = now
            metrics.first_token.observe(now - self._start)
        last = self._last.get(delta.index)
        if last is not None:
            metrics.per_token.gap(now - last)
        self._last[delta.index] = now
        self._tokens += count
        metrics.per_token.tokens += count

    def pooled(self, prompt_tokens: int, queue_seconds: float | None) -> None:
        """Observe the output of a request that embeds or reranks."""
        metrics = self._metrics
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.duration.observe(time.monotonic() - self._start)
        if queue_seconds is not None:
            metrics.queue.observe(queue_seconds)

    def finish(self, outcome: str) -> None:
        self.outcome = outcome


def outcome_of(error: BaseException | None) -> str:
    match error:
        case None:
            return "stop"
        case ClientGone():
            return "abort"
        case QueueFull():
            return "queue_full"
        case QueueTimeout():
            return "queue_timeout"
        case DeadlineExceeded():
            return "deadline"
        case RequestError():
            return "invalid"
        case Exception():
            return "error"
        case _:  # CancelledError, GeneratorExit: the client left
            return "abort"


class _CoreCollector(Collector):
    def __init__(self, engine_state: EngineState) -> None:
        self._engine_state = engine_state

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        state = self._engine_state()

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"leadline_engine_{name}", text, value=value)

        yield gauge("ready", "1 while the server takes requests.", float(state is not None and state[3]))
        if state is None:
            return
        stats, speeds, age, _ = state
        yield gauge("heartbeat_age_seconds", "Seconds since the engine core's last loop iteration.", age)
        yield gauge(
            "decode_step_seconds", "Recent mean time of a step that only decodes.", speeds.decode_step_seconds
        )
        yield gauge("prefill_tokens_per_second", "Recent rate of prefill.", speeds.prefill_tokens_per_second)
        yield gauge("running_requests", "Sequences that hold KV blocks.", stats.running)
        waiting = GaugeMetricFamily(
            "leadline_engine_waiting_requests", "Sequences without a slot.", labels=["priority_class"]
        )
        for name in ("interactive", "batch"):
            waiting.add_metric([name], stats.waiting_by_class.get(name, 0))
        yield waiting
        yield gauge(
            "queued_prefill_tokens", "Prompt tokens still to be computed.", stats.queued_prefill_tokens
        )
        yield gauge("kv_blocks", "KV blocks of the pool.", stats.blocks_total)
        yield gauge("kv_blocks_used", "KV blocks held by sequences.", stats.blocks_used)
        yield gauge("kv_blocks_cached", "KV blocks kept for prefix hits only.", stats.blocks_cached)
        for name, text, value in (
            ("preemptions", "Sequences that lost their blocks and were recomputed.", stats.preemptions_total),
            ("steps", "Steps of the engine core.", stats.steps_total),
            ("timeouts", "Sequences ended by queue timeout or deadline.", stats.timeouts_total),
            (
                "prefix_query_tokens",
                "Tokens of sequences at first admission.",
                stats.prefix_query_tokens_total,
            ),
            (
                "prefix_hit_tokens",
                "Tokens found in the prefix cache at first admission.",
                stats.prefix_hit_tokens_total,
            ),
            ("drafted_tokens", "Tokens that speculation drafted.", stats.drafted_tokens_total),
            ("accepted_tokens", "Drafted tokens that the model then sampled.", stats.accepted_tokens_total),
        ):
            yield CounterMetricFamily(f"leadline_engine_{name}", text, value=value)
