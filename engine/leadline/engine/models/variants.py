"""Layers in other orders than decoder.py draws: norms after attention and MLP, sums that are scaled, gates
that are not silu, norms over all heads, experts that are routed otherwise or have an MLP beside them.

    residual ─┬ [norm] → attn → o → sum over ranks → [norm] ─ * scale ─▶ + ─┬ [norm] → mlp → ... ─▶ +
              └────────────────────────────────────────────────────────────┘

The same parts as in decoder.py, on every device; a norm in brackets may be absent. There are no fused steps
of few rows here, and no norms joined with a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from leadline.engine.models.base import AttentionFn, KVWrite, Rotations
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.layers import Linear, Norm, RowLinear
from leadline.engine.models.ops import Ops
from leadline.engine.models.parallel import Sum, TensorParallel

__all__ = ["is_variant", "variant_layers", "with_factors"]


class DecoderParts(Protocol):
    """The parts of a `Decoder` that are used here."""

    config: ModelConfig
    layers: Sequence[Any]
    """DecoderLayers."""
    norm: Norm
    ops: Ops
    tp: TensorParallel

    def by_fabric(self, which: Sum, tokens: int) -> bool: ...


def is_variant(config: ModelConfig) -> bool:
    """Whether the layers of a model need this file."""
    names = config.names
    placed = (
        names.before_attention,
        names.before_mlp,
        names.after_attention is None,
        names.after_mlp is None,
    )
    return (
        not all(placed)
        or config.head_norms == "whole"
        or config.activation != "silu"
        or config.residual_scale != 1.0
        or (config.experts is not None and not config.experts.is_plain)
    )


def with_factors(attend: AttentionFn, factors: torch.Tensor) -> AttentionFn:
    """`attend` for queries that are multiplied by `factors`, [T]."""

    def scaled(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(layer, q * factors.to(q.dtype)[:, None, None], k, v)

    return scaled


def variant_layers(
    model: DecoderParts,
    residual: torch.Tensor,
    rotations: Rotations,
    attend: AttentionFn,
    write: KVWrite | None,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """residual [T, hidden], overwritten → hidden states [T, hidden] after the final norm, or those of `rows`
    alone."""
    last = model.layers[-1]
    x = _normed(model, residual, model.layers[0].before_attention)
    for index, layer in enumerate(model.layers):
        wanted = rows if layer is last else None
        x = layer.attention(x, rotations, attend, write, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
            if not len(wanted):
                return residual
        term = _normed(model, _summed(model, layer.o, x), layer.after_attention)
        x, residual = _add(model, term, residual, layer.before_mlp)
        if layer.experts is not None:
            term = layer.experts.partial(x)
            if layer.has_mlp:
                shared = Linear.__call__(layer.down, layer.activation(layer.gate_up(x)))
                if layer.shared_gate is not None:
                    shared = shared.mul_(F.linear(x, layer.shared_gate).sigmoid_())
                term.add_(shared)
            term = _total(model, Sum.DOWN, term)
        else:
            term = _summed(model, layer.down, layer.activation(layer.gate_up(x)))
        term = _normed(model, term, layer.after_mlp)
        following = model.norm if layer is last else model.layers[index + 1].before_attention
        x, residual = _add(model, term, residual, following)
    return x


def _normed(model: DecoderParts, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else model.ops.rms_norm(x, norm.weight, model.config.rms_norm_eps)


def _add(
    model: DecoderParts, term: torch.Tensor, residual: torch.Tensor, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of it, residual + scale * term), both arguments overwritten."""
    scale = model.config.residual_scale
    if norm is not None and scale == 1.0:
        return model.ops.add_rms_norm(term, residual, norm.weight, model.config.rms_norm_eps)
    residual.add_(term, alpha=scale)
    return _normed(model, residual, norm), residual


def _summed(model: DecoderParts, linear: RowLinear, x: torch.Tensor) -> torch.Tensor:
    """linear(x) over all ranks."""
    return _total(model, linear.which, linear.partial(x))


def _total(model: DecoderParts, which: Sum, term: torch.Tensor) -> torch.Tensor:
    fabric = model.tp.fabric
    if fabric is not None and model.by_fabric(which, len(term)):
        return fabric.sum(which, len(term))
    return model.tp.all_reduce(term)
