"""Wiring: an EngineConfig and what loading the model resolved become a Scheduler."""

from __future__ import annotations

from leadline.engine.config import EngineConfig
from leadline.engine.core.block_pool import BlockPool, PoolListener
from leadline.engine.core.plugins import load_eviction_policy, load_scheduling_policy
from leadline.engine.core.scheduler import Scheduler
from leadline.engine.core.settings import SchedulerConfig

__all__ = ["build_scheduler"]


def build_scheduler(
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    model: str = "",
    revision: str = "",
    listener: PoolListener | None = None,
    speculative_max_batch: int = 4,
    prefill_step_ms: float = 0.0,
    attention_work: float = 0.0,
) -> Scheduler:
    """A scheduler over a fresh pool of `num_blocks` blocks (what the runner allocated).

    model and revision name the prefix chain's namespace; model defaults to the served name.
    speculative_max_batch, prefill_step_ms: for a config that leaves them open. attention_work: cost of one
    key relative to one token's products (models/cost.py). Raises ConfigError for settings that cannot work
    and for unknown policies.
    """
    pool = BlockPool(num_blocks, load_eviction_policy(config.eviction_policy), listener)
    policy = load_scheduling_policy(config.scheduling_policy, config.class_weights)
    settings = SchedulerConfig.from_engine(
        config,
        max_model_len=max_model_len,
        model=model,
        revision=revision,
        speculative_max_batch=config.speculative_max_batch or speculative_max_batch,
        prefill_step_ms=prefill_step_ms if config.prefill_step_ms is None else config.prefill_step_ms,
        attention_work=attention_work,
    )
    return Scheduler(settings, pool, policy)
