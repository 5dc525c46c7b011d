"""The MLP of a layer as a mixture of experts: a router picks some for each token, and their weighted outputs
add up.

    x ─ router ─ softmax ─ the best of them ─▶ weights
    x ─ those experts: silu(x gateᵀ) * (x upᵀ), downᵀ ─▶ weighted sum

All experts of a layer lie in two tensors. Over ranks each expert is split as a plain MLP is: every rank has
some columns of all experts, routes alike, and leaves a term of the same sum.
"""

from __future__ import annotations

import torch

from leadline.engine.models.experts_config import ExpertsConfig
from leadline.engine.models.fp8 import quantize_rows, round_rows
from leadline.engine.models.layers import Place, Slot, Slots
from leadline.engine.models.ops import Ops
from leadline.engine.models.parallel import Sum, TensorParallel

__all__ = ["Experts"]


class Experts:
    """One layer's experts; this rank's columns of each."""

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, place: Place, tp: TensorParallel, ops: Ops
    ) -> None:
        self.config, self.tp, self.run = config, tp, ops.experts
        self.part = part = tp.share(config.intermediate_size)
        make = place.zeros if part.filled < part.count else place.empty
        self.router = place.empty(config.count, hidden_size)
        self.gate_up = make(config.count, 2 * part.count, hidden_size)
        self.down = make(config.count, hidden_size, part.count)
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        """float32 [E, 2n] and [E, hidden]: of the rows of gate_up and down, if those are in FP8"""

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → this rank's term of the output, where the fabric wants it if there is one."""
        out = None if self.tp.fabric is None else self.tp.fabric.partial(Sum.DOWN, len(x))
        config = self.config
        top, renormalize = config.per_token, config.renormalize
        return self.run(x, self.router, self.gate_up, self.down, top, renormalize, out, self.scales)

    def of_one(self, residual: torch.Tensor, norm: tuple[torch.Tensor, float]) -> None:
        """residual [1, hidden] += the output for the normed residual, over all ranks; on CUDA, in 16 bits.
        norm: weight and epsilon."""
        from leadline.engine.models.triton_experts_one import experts_of_one

        config, fabric = self.config, self.tp.fabric
        out = None if fabric is None else fabric.partial(Sum.DOWN, 1)
        experts_of_one(
            residual,
            norm,
            self.router,
            self.gate_up,
            self.down,
            config.per_token,
            config.renormalize,
            self.scales,
            out,
        )
        if fabric is not None:
            fabric.add(Sum.DOWN, residual)

    def quantize(self) -> None:
        """Call after loading: gate_up and down become FP8 (models/fp8.py), activations keep their bits."""
        if self.gate_up.is_cuda:
            self.gate_up, wide = _quantized(self.gate_up)
            self.down, tall = _quantized(self.down)
            self.scales = wide, tall
        else:
            for matrices in (self.gate_up, self.down):
                for matrix in matrices:
                    matrix.copy_(round_rows(matrix))

    def slots(self, prefix: str) -> Slots:
        """prefix: of the layer."""
        config, part, hidden = self.config, self.part, self.router.shape[1]
        names, filled = config.names, part.filled
        yield f"{prefix}.{names.router}.weight", Slot(self.router, tuple(self.router.shape))
        wide, tall = (config.intermediate_size, hidden), (hidden, config.intermediate_size)
        for expert in range(config.count):
            gate_up, down = self.gate_up[expert], self.down[expert]
            name = f"{prefix}.{names.experts}.{expert}"
            yield f"{name}.{names.gate}.weight", Slot(gate_up[:filled], wide, 0, part.start)
            up = gate_up[part.count : part.count + filled]
            yield f"{name}.{names.up}.weight", Slot(up, wide, 0, part.start)
            yield f"{name}.{names.down}.weight", Slot(down[:, :filled], tall, 1, part.start)


def _quantized(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_rows(matrices.flatten(0, 1))
    return values.view(matrices.shape), scales.view(matrices.shape[:2])
