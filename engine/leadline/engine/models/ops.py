"""The decoder's element-wise operations, as functions behind one table.

`select_ops(device)` gives the table for a device; fused kernels replace entries of it there and nothing else
changes. The functions here run everywhere and are the reference. All may overwrite their first argument (and
`residual`): the caller uses results only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leadline.engine.models.base import HeadNorms, KVTarget

__all__ = [
    "TORCH_OPS",
    "Ops",
    "add_rms_norm",
    "experts",
    "gelu_and_mul",
    "rms_norm",
    "rotary_heads",
    "select_ops",
    "silu_and_mul",
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; 16-bit types are reduced in float32. The
    weight may be in float32 beside x in 16 bits."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x); x and residual [T, hidden]."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2n] → [T, n]: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with gelu in its approximation by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def rotary_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
    target: KVTarget | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the merged projection into heads, norm q and k heads (Qwen3), rotate q and k.

    A `target` is only given to a table that `writes_kv`; this function leaves the writing to the backend.
    `positions` (int64 [T]) are only given to a table that `looks_up`: cos and sin are the whole tables then.

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], a row being | q heads | k heads | v heads |; cos and sin
    [T, 1, head_dim] in qkv's dtype, as models/rope.py lays them out. Returns q [T, num_heads, head_dim], k
    and v [T, num_kv_heads, head_dim]: views of one buffer, whose last dimension is contiguous and whose rows
    are not.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, cos.shape[-1])
    q_and_k = heads[:, : num_heads + num_kv_heads]
    if norms is not None:
        q_weight, k_weight, eps = norms
        q_and_k = torch.cat(
            (
                rms_norm(q_and_k[:, :num_heads], q_weight, eps),
                rms_norm(q_and_k[:, num_heads:], k_weight, eps),
            ),
            dim=1,
        )
    swapped = q_and_k.roll(cos.shape[-1] // 2, dims=-1)
    q_and_k.mul_(cos).addcmul_(swapped, sin)
    return q_and_k[:, :num_heads], q_and_k[:, num_heads:], heads[:, num_heads + num_kv_heads :]


def experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top: int,
    renormalize: bool,
    out: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    routing: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """A mixture of experts: each token goes through the `top` ones of highest softmax, whose outputs are
    weighted by it (renormalize: over the chosen ones) and added up.

    x [T, hidden]; router [E, hidden]; gate_up [E, 2n, hidden], a row of it being | gate | up |; down [E,
    hidden, n]; scales float32 [E, 2n] and [E, hidden] of their rows, if they are in FP8. Returns [T, hidden],
    `out` if it is given. routing: experts int64 [T, top] and weights float32 [T, top], chosen elsewhere.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if routing is not None:
        chosen, weights = routing
    else:
        odds = F.linear(x, router).to(wide).softmax(dim=-1)
        weights, chosen = odds.topk(top, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in chosen.unique().tolist():
        rows, choice = (chosen == expert).nonzero(as_tuple=True)
        first, second = gate_up[expert], down[expert]
        if scales is not None:
            first, second = (
                (matrix.to(wide) * scale[expert, :, None]).to(x.dtype)
                for matrix, scale in zip((first, second), scales, strict=True)
            )
        made = F.linear(silu_and_mul(F.linear(x[rows], first)), second)
        total.index_add_(0, rows, made * weights[rows, choice, None])
    return total.to(x.dtype) if out is None else out.copy_(total)


@dataclass(slots=True, frozen=True)
class Ops:
    """One implementation of each operation; signatures as the functions of this module."""

    rms_norm: Callable[..., torch.Tensor] = rms_norm
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_rms_norm
    silu_and_mul: Callable[..., torch.Tensor] = silu_and_mul
    gelu_and_mul: Callable[..., torch.Tensor] = gelu_and_mul
    rotary_heads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = rotary_heads
    experts: Callable[..., torch.Tensor] = experts
    writes_kv: bool = False
    """rotary_heads writes keys and values to its `target`, so that the attention backend need not."""
    looks_up: bool = False
    """rotary_heads takes its tokens' rows from the tables by itself."""


TORCH_OPS = Ops()


def select_ops(device: torch.device) -> Ops:
    """The fastest table for `device`: fused Triton kernels on CUDA, where Triton can be imported."""
    if device.type != "cuda":
        return TORCH_OPS
    try:
        from leadline.engine.models import triton_ops as fused
    except ImportError:
        return TORCH_OPS
    return Ops(
        fused.rms_norm,
        fused.add_rms_norm,
        fused.silu_and_mul,
        fused.gelu_and_mul,
        fused.rotary_heads,
        fused.experts,
        writes_kv=True,
        looks_up=True,
    )
