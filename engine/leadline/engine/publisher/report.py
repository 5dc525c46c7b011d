"""The load report of one engine: a pure function of what the core last said."""

from __future__ import annotations

import time
from dataclasses import dataclass

from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.protocol.load import LoadReport

__all__ = ["Identity", "load_report"]


@dataclass(slots=True, frozen=True)
class Identity:
    """What stays the same for the life of the engine."""

    pod: str
    address: str
    """host:port of the HTTP API, as gateways reach it."""
    epoch: str
    model: str
    """Model id as the prefix chain's namespace has it."""
    revision: str
    served_names: tuple[str, ...]
    block_size: int
    max_model_len: int
    max_concurrent_requests: int = 0
    tokenizer: str = ""
    """Digest of the tokenizer bundle."""


def load_report(identity: Identity, stats: SchedulerStats, speeds: Speeds, *, draining: bool) -> LoadReport:
    """The heartbeat of this moment."""
    return LoadReport(
        pod=identity.pod,
        address=identity.address,
        epoch=identity.epoch,
        time=time.time(),
        model=identity.model,
        revision=identity.revision,
        tokenizer=identity.tokenizer,
        served_names=list(identity.served_names),
        block_size=identity.block_size,
        max_model_len=identity.max_model_len,
        max_concurrent_requests=identity.max_concurrent_requests,
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        free_blocks=stats.blocks_free + stats.blocks_cached,
        total_blocks=stats.blocks_total,
        prefill_tokens_per_second=speeds.prefill_tokens_per_second,
        decode_step_seconds=speeds.decode_step_seconds,
        draining=draining,
    )
