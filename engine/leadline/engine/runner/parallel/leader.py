"""ParallelRunner: rank 0's shard and the plans for all others, behind the contract of `core.plan.Runner`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core.plan import StepHandle, StepPlan, StepResult
from leadline.engine.errors import ConfigError, EngineDead
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.parallel import check_split, split_heads
from leadline.engine.runner.collectives.group import RankGroup, device_of, ranks_share_a_gpu
from leadline.engine.runner.memory import oom_message
from leadline.engine.runner.model_runner import ModelRunner
from leadline.engine.runner.parallel.agreement import checksums
from leadline.engine.runner.parallel.codec import PlanEncoder
from leadline.engine.runner.parallel.messages import Setup
from leadline.engine.runner.parallel.ranks import Ranks
from leadline.engine.runner.parallel.ring import PlanWriter, frame_bytes, unnamed_file
from leadline.engine.runner.shard import build_shard, resolve_context, resolve_device
from leadline.engine.system.cpu_limit import usable_cores
from leadline.engine.system.progress import ReportStage, no_report

__all__ = ["ParallelRunner", "build_parallel_runner"]

logger = logging.getLogger("leadline.engine.runner")

CHECK_VARIABLE = "LEADLINE_TP_CHECK"
TIMEOUT_VARIABLE = "LEADLINE_TP_TIMEOUT"
_STEP_SECONDS = {"cpu": 900.0, "cuda": 180.0}
"""The longest step there may be; first ones compile kernels. The variable overrides it."""
_NCCL_SECONDS = 10.0
"""How long `close` waits for NCCL's memory to be given back."""


@dataclass(slots=True)
class _Handle:
    inner: StepHandle
    ranks: Ranks

    def wait(self) -> StepResult:
        with self.ranks.guard():
            return self.inner.wait()


class ParallelRunner:
    """Implements `core.plan.Runner` over several ranks. Any failure in a step is EngineDead: ranks that have
    run different steps cannot go on."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        ranks: Ranks,
        group: RankGroup,
        plans: PlanWriter,
        *,
        check: bool,
    ) -> None:
        """`check`: compare the sampled tokens of all ranks after each step, which waits for it."""
        self.runner = runner
        self.ranks = ranks
        self.group = group
        self.plans = plans
        self.device = runner.device
        self.num_blocks = runner.num_blocks
        self._encoder = PlanEncoder(runner.tables)
        self._config = config
        self._check = check

    def launch(self, plan: StepPlan) -> StepHandle:
        """Publish the plan, then start this rank's part. Raises EngineDead."""
        with self.ranks.guard():
            self.plans.write(self._encoder.encode(plan))
            try:
                handle = self.runner.launch(plan)
            except torch.OutOfMemoryError as error:
                message = oom_message(self._config, "in a step", self.runner.max_model_len)
                raise EngineDead(f"rank 0: {message}") from error
            if self._check:
                seen = checksums(self.group, handle)
                if len(set(seen)) > 1:
                    raise EngineDead(
                        f"the ranks disagree on the tokens of step {plan.step_id}: their checksums are {seen}"
                    )
        return _Handle(handle, self.ranks)

    def check_alive(self) -> None:
        """Raise EngineDead if a rank has died. For when there is nothing to launch."""
        self.ranks.check_alive()

    def close(self) -> None:
        """Stop the workers. Happens by itself when the runner is dropped or the process ends."""
        self.ranks.dead = self.ranks.dead or EngineDead("the engine has been closed")
        self.ranks.close()
        self.group.abort()
        if self.runner.graphs is not None:
            self.runner.graphs.clear()
        self.group.abort(_NCCL_SECONDS)


def _warn_of_padding(config: ModelConfig, size: int) -> None:
    heads, _ = split_heads(0, size, config.num_heads, config.num_kv_heads)
    if heads.count * size > config.num_heads:
        logger.warning(
            "%d query heads over %d KV heads do not divide by tensor_parallel %d: each rank computes %d, the "
            "missing ones as zeros",
            config.num_heads,
            config.num_kv_heads,
            size,
            heads.count,
        )


def build_parallel_runner(
    config: EngineConfig,
    local: LocalModel,
    model_config: ModelConfig,
    *,
    progress: bool = True,
    report: ReportStage = no_report,
) -> tuple[ParallelRunner, int]:
    """Start the workers and build all ranks' shards. Returns the runner and the context length it can serve.

    Raises what `build_runner` does, whichever rank it happened on.
    """
    size = config.tensor_parallel
    check_split(model_config, size)
    _warn_of_padding(model_config, size)
    frame = frame_bytes(config, resolve_context(config, model_config))
    device = resolve_device(config)
    if device.type == "cuda":
        if torch.cuda.device_count() < size and not ranks_share_a_gpu():
            raise ConfigError(
                f"tensor_parallel {size} needs as many GPUs, and {torch.cuda.device_count()} are visible; "
                "lower it, or look at CUDA_VISIBLE_DEVICES and the pod's GPU limit"
            )
        device = device_of(0)
        torch.cuda.set_device(device)
    elif config.cpu_threads is None and "OMP_NUM_THREADS" not in os.environ:
        config = config.replace(cpu_threads=max(1, usable_cores() // size))
    config = config.replace(device=device.type)
    check = os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")
    level = logging.getLogger().getEffectiveLevel()

    def setup(rank: int) -> Setup:
        return Setup(config, rank, str(local.path), local.model_id, local.revision, check, level)

    meeting_fd, plans_fd = unnamed_file(), unnamed_file()
    try:
        ranks = Ranks(size, meeting_fd, plans_fd)
        try:
            with ranks.guard(building=True):
                sockets = [worker.socket for worker in ranks.workers]
                plans = PlanWriter(plans_fd, frame, sockets, ranks.await_ack)
                ranks.send_setup(setup)
                group = RankGroup(meeting_fd, 0, size, device)
                ranks.abort = group.abort
                runner, length = build_shard(
                    config, local, model_config, progress=progress, report=report, group=group
                )
                for rank, loaded in enumerate(ranks.await_loaded(), 1):
                    if (loaded.num_blocks, loaded.max_model_len) != (runner.num_blocks, length):
                        raise EngineDead(
                            f"rank {rank} has {loaded.num_blocks} KV blocks and a context of "
                            f"{loaded.max_model_len}; rank 0 has {runner.num_blocks} and {length}"
                        )
        except BaseException:
            ranks.close()
            raise
    finally:
        os.close(meeting_fd)
        os.close(plans_fd)
    ranks.supervise(float(os.environ.get(TIMEOUT_VARIABLE) or _STEP_SECONDS[device.type]))
    return ParallelRunner(config, runner, ranks, group, plans, check=check), length
