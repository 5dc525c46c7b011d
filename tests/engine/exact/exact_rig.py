"""An engine core over the shared demo model, driven step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub.local import LocalModel
from leadline.engine.messages import CoreOutput, CoreRequest
from leadline.engine.models.base import CausalLM
from leadline.engine.sampling_params import SamplingParams

__all__ = ["EOS", "Rig"]

EOS = (2,)
"""SmolLM2's only end token."""


class Rig:
    """Builds cores cheaply (weights are shared) and collects what they put out."""

    def __init__(self, local: LocalModel, model: CausalLM) -> None:
        self.local = local
        self.model = model

    def core(self, **settings: Any) -> EngineCore:
        settings = {"max_concurrent_requests": 64, "cpu_kv_bytes": 1 << 28, "max_model_len": 512, **settings}
        # What a step holds must not depend on the time that steps take.
        settings.setdefault("prefill_step_ms", 0.0)
        config = EngineConfig(model="smollm2", device="cpu", **settings)
        return EngineCore(config, self.local, model=self.model, progress=False)

    @staticmethod
    def request(
        request_id: str, prompt: list[int], sampling: SamplingParams, *, seed: int = 0, **fields: Any
    ) -> CoreRequest:
        fields.setdefault("eos_token_ids", EOS)
        return CoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed,
            arrival=time.monotonic(),
            **fields,
        )

    def run(
        self,
        core: EngineCore,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        *,
        seeds: list[int] | None = None,
        on_step: Callable[[int, dict[str, list[int]]], None] | None = None,
        **fields: Any,
    ) -> list[list[int]]:
        """Run all prompts together to their end; return their new tokens in order. Checks the scheduler's
        state at the end."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        for i, prompt in enumerate(prompts):
            seed = seeds[i] if seeds else i
            core.add_request(self.request(str(i), prompt, params[i], seed=seed, **fields))
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        self.outputs: dict[str, CoreOutput] = {}
        self.all_outputs: list[CoreOutput] = []
        step = 0
        while core.has_work():
            for output in core.step():
                self.all_outputs.append(output)
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.request_id not in self.outputs, "two final outputs of one request"
                    self.outputs[output.request_id] = output
            step += 1
            if on_step is not None:
                on_step(step, tokens)
        assert len(self.outputs) == len(prompts)
        core.check_integrity()
        stats = core.stats()
        assert stats.running == stats.waiting == stats.blocks_used == stats.steps_in_flight == 0
        return [tokens[str(i)] for i in range(len(prompts))]
