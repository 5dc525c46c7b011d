"""The MLP of a layer as a mixture of experts: a router picks some for each token, and their weighted outputs
add up.

    x ─ router ─ softmax ─ the best of them ─▶ weights
    x ─ those experts: silu(x gateᵀ) * (x upᵀ), downᵀ ─▶ weighted sum

Other routers score by sigmoids, choose by scores with a learned correction, or among the best groups of
experts only; those go through `route`. An MLP of all tokens beside the experts is the layer's own.

All experts of a layer lie in two tensors. Over ranks each expert is split as a plain MLP is: every rank has
some columns of all experts, routes alike, and leaves a term of the same sum.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from leadline.engine.models.experts_config import ExpertsConfig
from leadline.engine.models.fp8 import FP8
from leadline.engine.models.layers import Form, Place, Slot, Slots
from leadline.engine.models.ops import Ops
from leadline.engine.models.parallel import Sum, TensorParallel
from leadline.engine.models.targets import FP8Rows, RoundedRows, Target

__all__ = ["Experts"]


class Experts:
    """One layer's experts; this rank's columns of each."""

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, place: Place, tp: TensorParallel, ops: Ops
    ) -> None:
        self.config, self.tp, self.run = config, tp, ops.experts
        self.part = part = tp.share(config.intermediate_size)
        padded = part.filled < part.count
        wide = dataclasses.replace(place, dtype=torch.promote_types(place.dtype, torch.float32))
        self.router = (wide if config.names.wide_router else place).empty(config.count, hidden_size)
        self.bias = None if config.names.bias is None else wide.zeros(config.count)
        self.gate_up = place.matrix(config.count, 2 * part.count, hidden_size, padded=padded)
        self.down = place.matrix(config.count, hidden_size, part.count, padded=padded)
        self.form, self.dtype = Form.PLAIN, place.dtype
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        """float32 [E, 2n] and [E, hidden]: of the rows of gate_up and down, if those are in FP8"""

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → this rank's term of the output, where the fabric wants it if there is one."""
        out = None if self.tp.fabric is None else self.tp.fabric.partial(Sum.DOWN, len(x))
        config = self.config
        top, renormalize = config.per_token, config.renormalize
        routing = None if config.is_plain else self.route(x)
        return self.run(x, self.router, self.gate_up, self.down, top, renormalize, out, self.scales, routing)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] → the experts of each token, int64 [T, top], and their weights, float32 [T, top]."""
        config = self.config
        logits = F.linear(x.to(self.router.dtype), self.router)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.sigmoid() if config.names.scoring == "sigmoid" else logits.softmax(dim=-1)
        ranked = scores if self.bias is None else scores + self.bias
        if config.groups > 1:
            grouped = ranked.unflatten(1, (config.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(config.top_groups, dim=-1).indices
            outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(
                1, best, False
            )
            ranked = grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
        chosen = ranked.topk(config.per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * config.scale

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

    def keep(self, form: Form, device: torch.device) -> None:
        """Allocate weights that were left for later; padding is zero. In FP8 activations keep their bits."""
        self.form = form
        kind = FP8 if form is Form.FP8 else self.dtype
        self.gate_up = torch.zeros(self.gate_up.shape, dtype=kind, device=device)
        self.down = torch.zeros(self.down.shape, dtype=kind, device=device)
        if form is Form.FP8:
            wide, tall = (
                torch.zeros(matrices.shape[:2], dtype=torch.float32, device=device)
                for matrices in (self.gate_up, self.down)
            )
            self.scales = wide, tall

    def slots(self, prefix: str) -> Slots:
        """prefix: of the layer."""
        config, part, hidden = self.config, self.part, self.router.shape[1]
        names, filled = config.names, part.filled
        yield f"{prefix}.{names.router}.weight", Slot(self.router, tuple(self.router.shape))
        if self.bias is not None:
            yield f"{prefix}.{names.bias}", Slot(self.bias, tuple(self.bias.shape))
        wide, tall = (config.intermediate_size, hidden), (hidden, config.intermediate_size)
        for expert in range(config.count):
            name = f"{prefix}.{names.experts}.{expert}"
            gate = self._part(0, expert, slice(0, filled), hidden)
            yield f"{name}.{names.gate}.weight", Slot(gate, wide, 0, part.start)
            up = self._part(0, expert, slice(part.count, part.count + filled), hidden)
            yield f"{name}.{names.up}.weight", Slot(up, wide, 0, part.start)
            down = self._part(1, expert, slice(0, hidden), filled)
            yield f"{name}.{names.down}.weight", Slot(down, tall, 1, part.start)

    def _part(self, which: int, expert: int, rows: slice, columns: int) -> torch.Tensor | Target:
        """Return where rows and the first `columns` columns of an expert's gate_up (0) or down (1) go."""
        values = (self.gate_up, self.down)[which][expert, rows, :columns]
        if self.scales is not None:
            return FP8Rows(values, self.scales[which][expert, rows, None], self.dtype)
        return RoundedRows(values) if self.form is Form.ROUNDED else values
