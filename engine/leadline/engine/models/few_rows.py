"""The decoder's layers for a step of few rows on one GPU, in six kernels a layer instead of eleven.

    residual ─▶ norm + qkv ─▶ norm heads, rotate, write KV ─▶ attend ─▶ o + residual
             ─▶ norm + gate, up, silu, mul ─▶ down + residual

Over several ranks o and down leave terms of a sum, and the fabric adds it to the residual: eight kernels. In
place of the MLP a layer may have experts (triton_experts_one.py).

One row goes through matrix-vector products (triton_gemv.py; triton_grouped.py for weights in groups), 2 to 64
rows through triton_skinny.py. Same
weights and the same cache as `Decoder.forward`; sums are rounded to the model's dtype less often, and beside
weights in FP8 activations keep their 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from leadline.engine.models import triton_grouped
from leadline.engine.models.base import AttentionFn, KVWrite, Rotations
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.layers import Linear
from leadline.engine.models.parallel import Sum
from leadline.engine.models.triton_gemv import gemv
from leadline.engine.models.triton_skinny import MAX_ROWS, Workspace, enter_kernel, skinny

__all__ = ["FewRows"]


class FewRows:
    """Runs steps of few rows for one model; made by `FewRows.of`."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.space = Workspace(model.hidden_size, model.dtype, model.device)
        # Scaled residuals could pass float16's largest number, and experts take many rows faster. Weights in
        # groups have products of their own for several rows.
        many = model.dtype == torch.bfloat16 and model.config.experts is None
        many = many and all(linear.grouped is None for layer in model.layers for linear in layer.linears)
        self.max_rows = MAX_ROWS if many else 1
        self._chosen: dict[int, bool] = {}

    def takes(self, rows: int) -> bool:
        """Whether a step of `rows` rows runs here rather than through the plain layers.

        One row always does. For more rows the last `choose` for the next larger size decides. Without one,
        they do too.
        """
        if not self.may_take(rows):
            return rows == 1
        size = min((size for size in self._chosen if size >= rows), default=None)
        return size is None or self._chosen[size]

    def may_take(self, rows: int) -> bool:
        """Whether a step of `rows` rows can run here and through the plain layers."""
        return 1 < rows <= self.max_rows

    def choose(self, rows: int, here: bool) -> None:
        """Let steps of `rows` rows run here (True) or through the plain layers (False)."""
        self._chosen[rows] = here

    @staticmethod
    def of(model: Decoder) -> FewRows | None:
        """None unless it is one rank or there is a fabric, 16 bits on CUDA, no biases, widths that are
        multiples of 64, no columns out of order (act-order)."""
        linears = [linear for layer in model.layers for linear in layer.linears]
        fits = (
            (model.tp.size == 1 or model.tp.fabric is not None)
            and model.device.type == "cuda"
            and model.dtype in (torch.float16, torch.bfloat16)
            and model.ops.writes_kv
            and all(linear.bias is None and linear.in_features % 64 == 0 for linear in linears)
            and all(linear.grouped is None or linear.grouped.order is None for linear in linears)
        )
        return FewRows(model) if fits else None

    def layers(
        self,
        residual: torch.Tensor,
        rotations: Rotations,
        attend: AttentionFn,
        write: KVWrite,
    ) -> torch.Tensor:
        """residual [R, hidden], overwritten → hidden states [R, hidden] after the final norm."""
        if residual.shape[0] == 1:
            self._one(residual, rotations, attend, write)
        elif self.model.tp.fabric is not None:
            return self._few_ranks(residual, rotations, attend, write)
        else:
            self._few(residual, rotations, attend, write)
        model = self.model
        return model.ops.rms_norm(residual, model.norm.weight, model.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """hidden [R, hidden], R <= max_rows → [R, vocab]; for one rank."""
        weight = self.model.head.linear.weight
        if hidden.shape[0] == 1:
            return gemv(hidden, weight, out=out)
        return skinny(hidden, weight, self.space, out=out)

    def _one(
        self,
        residual: torch.Tensor,
        rotations: Rotations,
        attend: AttentionFn,
        write: KVWrite,
    ) -> None:
        eps, fabric = self.model.config.rms_norm_eps, self.model.tp.fabric
        for layer in self.model.layers:
            qkv = _product(residual, layer.qkv, norm=(layer.input_norm.weight, eps))
            attended = layer.attend(qkv, rotations, attend, write)
            if fabric is None:
                _product(attended, layer.o, residual=residual)
            else:
                _product(attended, layer.o, out=fabric.partial(Sum.O, 1))
                fabric.add(Sum.O, residual)
            if layer.experts is not None:
                layer.experts.of_one(residual, (layer.post_norm.weight, eps))
                continue
            act = _product(residual, layer.gate_up, norm=(layer.post_norm.weight, eps), gated=True)
            if fabric is None:
                _product(act, layer.down, residual=residual)
            else:
                _product(act, layer.down, out=fabric.partial(Sum.DOWN, 1))
                fabric.add(Sum.DOWN, residual)

    def _few(
        self,
        residual: torch.Tensor,
        rotations: Rotations,
        attend: AttentionFn,
        write: KVWrite,
    ) -> None:
        model, space, eps = self.model, self.space, self.model.config.rms_norm_eps
        rows, hidden = residual.shape
        scaled = space.scaled[:rows]
        enter_kernel[(rows,)](
            residual,
            model.layers[0].input_norm.weight,
            scaled,
            space.squares,
            rows,
            WIDTH=hidden,
            TILE=triton.next_power_of_2(hidden),
            BLOCKS=space.blocks,
            ROWS=max(16, triton.next_power_of_2(rows)),
            num_warps=4,
        )
        for layer, next_norm in zip(model.layers, model.following_norms, strict=True):
            qkv = skinny(scaled, layer.qkv.weight, space, layer.qkv.scale, eps=eps, norm=True)
            attended = layer.attend(qkv, rotations, attend, write)
            skinny(
                attended,
                layer.o.weight,
                space,
                layer.o.scale,
                residual=residual,
                next_norm=layer.post_norm.weight,
            )
            act = skinny(
                scaled, layer.gate_up.weight, space, layer.gate_up.scale, eps=eps, norm=True, gated=True
            )
            skinny(
                act, layer.down.weight, space, layer.down.scale, residual=residual, next_norm=next_norm.weight
            )

    def _few_ranks(
        self,
        residual: torch.Tensor,
        rotations: Rotations,
        attend: AttentionFn,
        write: KVWrite,
    ) -> torch.Tensor:
        """The norm comes with the sum over ranks, which has whole rows at hand."""
        model, space, eps = self.model, self.space, self.model.config.rms_norm_eps
        fabric, rows = model.tp.fabric, residual.shape[0]
        assert fabric is not None
        x = model.ops.rms_norm(residual, model.layers[0].input_norm.weight, eps)
        for layer, next_norm in zip(model.layers, model.following_norms, strict=True):
            qkv = skinny(x, layer.qkv.weight, space, layer.qkv.scale)
            attended = layer.attend(qkv, rotations, attend, write)
            skinny(attended, layer.o.weight, space, layer.o.scale, out=fabric.partial(Sum.O, rows))
            x = fabric.add_rms_norm(Sum.O, residual, layer.post_norm.weight, eps)
            act = skinny(x, layer.gate_up.weight, space, layer.gate_up.scale, gated=True)
            skinny(act, layer.down.weight, space, layer.down.scale, out=fabric.partial(Sum.DOWN, rows))
            x = fabric.add_rms_norm(Sum.DOWN, residual, next_norm.weight, eps)
        return x


def _product(x: torch.Tensor, linear: Linear, **options: Any) -> torch.Tensor:
    """One row times a linear's weight in any form; options: those of `gemv`."""
    if linear.grouped is not None:
        return triton_grouped.gemv(x, linear.grouped, **options)
    return gemv(x, linear.weight, linear.scale, **options)
