"""A mixture of experts for one token: matrix-vector products with the token's experts, in four kernels.

    residual ─▶ norm + router ─▶ choose ─▶ norm + gate, up, silu, mul of each ─▶ down of each, weighted
                                                                                 + residual

Pairs need not be put in order, as those of many tokens (triton_experts.py). Each kernel starts while the one
before it still runs, and waits for it (programmatic dependent launch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from leadline.engine.models.triton_experts import top_of
from leadline.engine.models.triton_gemv import gemv

__all__ = ["experts_of_one"]

_LARGEST_TILE = 2048


@triton.jit
def _choose_kernel(
    logits, chosen, weights, EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr,
    TOP_TILE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    gdc_wait()
    which, share = top_of(logits, EXPERTS, TILE, TOP, TOP_TILE, RENORMALIZE)
    ranks = tl.arange(0, TOP_TILE)
    tl.store(chosen + ranks, which, mask=ranks < TOP)
    tl.store(weights + ranks, share, mask=ranks < TOP)


@triton.jit
def _enter_kernel(
    x, norm_weight, matrices, scales, chosen, out, eps, IN: tl.constexpr, OUT: tl.constexpr,
    TILE: tl.constexpr, OUTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (i, choice): outputs [i * OUTS, (i + 1) * OUTS) of out [TOP, OUT]. matrices [E, 2 OUT, IN]."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    choice = tl.program_id(1)
    live = outs < OUT
    lanes = tl.arange(0, TILE)
    gdc_launch_dependents()
    gdc_wait()
    row = tl.load(chosen + choice).to(tl.int64) * (2 * OUT) + outs
    at = matrices + row[:, None] * IN + lanes[None, :]
    gate = tl.zeros([OUTS], tl.float32)
    up = tl.zeros([OUTS], tl.float32)
    squares = 0.0
    for start in tl.static_range(0, IN, TILE):
        inside = start + lanes < IN
        mask = live[:, None] & inside[None, :]
        first = tl.load(at + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        second = tl.load(at + OUT * IN + start, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + start + lanes, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(value * value, axis=0)
        value *= tl.load(norm_weight + start + lanes, mask=inside, other=0.0).to(tl.float32)
        gate += tl.sum(first * value[None, :], axis=1)
        up += tl.sum(second.to(tl.float32) * value[None, :], axis=1)
    inverse = tl.rsqrt(squares / IN + eps)
    if SCALED:
        gate *= tl.load(scales + row, mask=live, other=0.0)
        up *= tl.load(scales + OUT + row, mask=live, other=0.0)
    gate *= inverse
    up *= inverse
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + choice * OUT + outs, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def _leave_kernel(
    x, matrices, scales, chosen, weights, out, IN: tl.constexpr, OUT: tl.constexpr, TOP: tl.constexpr,
    TILE: tl.constexpr, OUTS: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program i: outputs [i * OUTS, (i + 1) * OUTS). x [TOP, IN], matrices [E, OUT, IN]. ADD: to what out
    has."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    live = outs < OUT
    lanes = tl.arange(0, TILE)
    gdc_launch_dependents()
    gdc_wait()
    total = tl.zeros([OUTS], tl.float32)
    for choice in tl.static_range(TOP):
        row = tl.load(chosen + choice).to(tl.int64) * OUT + outs
        term = tl.zeros([OUTS], tl.float32)
        for start in tl.static_range(0, IN, TILE):
            inside = start + lanes < IN
            tile = tl.load(
                matrices + row[:, None] * IN + start + lanes[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            value = tl.load(x + choice * IN + start + lanes, mask=inside, other=0.0).to(tl.float32)
            term += tl.sum(tile.to(tl.float32) * value[None, :], axis=1)
        if SCALED:
            term *= tl.load(scales + row, mask=live, other=0.0)
        total += term * tl.load(weights + choice)
    if ADD:
        total += tl.load(out + outs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + outs, total.to(out.dtype.element_ty), mask=live)


def experts_of_one(
    residual: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top: int,
    renormalize: bool,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None,
) -> None:
    """out [1, hidden] = the experts' output for the normed residual [1, hidden]; without `out` it is added to
    the residual. norm: weight and epsilon; the rest as `models.ops.experts` takes it."""
    count, inner, hidden = router.shape[0], down.shape[2], down.shape[1]
    logits = gemv(residual, router, norm=norm)
    chosen = torch.empty(top, dtype=torch.int32, device=router.device)
    weights = torch.empty(top, dtype=torch.float32, device=router.device)
    _choose_kernel[(1,)](
        logits,
        chosen,
        weights,
        EXPERTS=count,
        TILE=triton.next_power_of_2(count),
        TOP=top,
        TOP_TILE=triton.next_power_of_2(top),
        RENORMALIZE=renormalize,
        num_warps=1,
        launch_pdl=True,
    )
    inside = residual.new_empty((top, inner))
    tile = min(triton.next_power_of_2(hidden), _LARGEST_TILE)
    outs = 4 if tile <= 1024 else 2
    _enter_kernel[(triton.cdiv(inner, outs), top)](
        residual,
        norm[0],
        gate_up,
        weights if scales is None else scales[0],
        chosen,
        inside,
        norm[1],
        IN=hidden,
        OUT=inner,
        TILE=tile,
        OUTS=outs,
        SCALED=scales is not None,
        num_warps=4,
        launch_pdl=True,
    )
    _leave_kernel[(triton.cdiv(hidden, 4),)](
        inside,
        down,
        weights if scales is None else scales[1],
        chosen,
        weights,
        residual if out is None else out,
        IN=inner,
        OUT=hidden,
        TOP=top,
        TILE=min(triton.next_power_of_2(inner), _LARGEST_TILE),
        OUTS=4,
        SCALED=scales is not None,
        ADD=out is None,
        num_warps=4,
        launch_pdl=True,
    )
