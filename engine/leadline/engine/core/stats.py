"""Numbers about the scheduler and its speed, for metrics and load reports. Totals count since the start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats", "Speeds"]


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """A snapshot. Sequences, blocks or tokens, as each name says."""

    running: int
    prefilling: int
    """Of running: those whose known tokens are not all computed."""
    waiting: int
    """Everything that has no slot: queued, parked behind another's prefill, draining after preemption."""
    waiting_by_class: dict[str, int]
    parked: int
    """Of waiting: those that wait for a prefix another sequence is computing."""
    queued_prefill_tokens: int
    """Known tokens of waiting and prefilling sequences still to be computed, prefix hits not foreseen."""
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    """Unreferenced but kept for prefix hits; free + used + cached = total."""
    steps_in_flight: int

    steps_total: int
    requests_total: int
    preemptions_total: int
    prefix_query_tokens_total: int
    """Tokens of sequences at first admission."""
    prefix_hit_tokens_total: int
    """Of these, found in the prefix cache."""
    generated_tokens_total: int
    timeouts_total: int
    """Ended by queue timeout or deadline."""
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    """Of these, the ones that were what the model sampled."""


@dataclass(slots=True, frozen=True)
class Speeds:
    """Exponential moving averages, 0.0 until measured."""

    prefill_tokens_per_second: float
    decode_step_seconds: float
