"""The engine core: scheduler, block pool, prefix cache and the policies around them. Pure Python, no torch.

    build_scheduler(config, …)   everything below, wired from an EngineConfig
    Scheduler                    requests → StepPlan, StepResult → outputs
    SchedulerConfig              its settings
    BlockPool, PoolListener      KV blocks and the prefix index; who hears of its changes
    SchedulingPolicy, WeightedPolicy
    EvictionPolicy, LRUEviction, LengthAwareEviction
    SchedulerStats               numbers for metrics

`plan.py` is the contract with the runner.
"""

from leadline.engine.core.block_pool import BlockPool, IntegrityError, PoolListener
from leadline.engine.core.build import build_scheduler
from leadline.engine.core.eviction import EvictionPolicy, LengthAwareEviction, LRUEviction
from leadline.engine.core.policy import SchedulingPolicy, WeightedPolicy
from leadline.engine.core.scheduler import Scheduler
from leadline.engine.core.settings import SchedulerConfig
from leadline.engine.core.stats import SchedulerStats

__all__ = [
    "BlockPool",
    "EvictionPolicy",
    "IntegrityError",
    "LRUEviction",
    "LengthAwareEviction",
    "PoolListener",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulingPolicy",
    "WeightedPolicy",
    "build_scheduler",
]
