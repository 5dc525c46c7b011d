"""The decoder's element-wise operations as fused Triton kernels: what `models.ops.select_ops` gives CUDA.

Each kernel reads its inputs once and writes its outputs once, in place where the caller allows it, and
rounds to the model's dtype once, after float32 arithmetic:

    add_rms_norm    residual += x;  x = norm(residual) * weight      one program a row
    silu_and_mul    silu(gate) * up                                  one program a row and COLUMNS columns
    gelu_and_mul    the same with gelu (by tanh)
    rotary_heads    norm and rotate q and k heads, in place; given a cache, write k and v into it

A row of the merged projection, as rotary_heads sees it; HEADS of its heads are one program's tile:

    | q heads ............ | k heads ... | v heads ... |      head = | first half | second half |
      norm, rotate           norm, rotate  as it is            out1 = x1 c - x2 s, out2 = x2 c + x1 s
      back in place          in place,     into the cache
                             and into the cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from leadline.engine.models.base import HeadNorms, KVTarget
from leadline.engine.models.triton_experts import experts

__all__ = ["add_rms_norm", "experts", "gelu_and_mul", "rms_norm", "rotary_heads", "silu_and_mul"]


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    at = row * WIDTH + columns
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + at, mask=mask, other=0.0)
    if ADD:
        total = value.to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        value = total.to(residual.dtype.element_ty)
        tl.store(residual + at, value, mask=mask)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    tl.store(out + at, (wide * inverse * scale).to(out.dtype.element_ty), mask=mask)


_PDL_TOKENS = 128
"""Up to so many tokens a kernel may start before the one before it has ended, and waits for it by itself
(programmatic dependent launch): launch gaps count there."""


def _launch(x: torch.Tensor, tokens: int) -> dict[str, bool]:
    """PDL, and the launch option that goes with it."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and tokens <= _PDL_TOKENS else {"PDL": False}


def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool
) -> None:
    rows, width = x.shape[0], x.shape[-1]
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            eps,
            width,
            triton.next_power_of_2(width),
            add,
            num_warps=4 if width <= 2048 else 8,
            **_launch(x, rows),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `models.ops.rms_norm`; x [T, hidden], contiguous."""
    out = torch.empty_like(x)
    _norm(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `models.ops.add_rms_norm`. Both arguments, contiguous, are overwritten by the results."""
    _norm(x, residual, weight, x, eps, add=True)
    return x, residual


@triton.jit
def _gate_kernel(
    gate_up, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    # gelu by tanh is 0.5 x (1 + tanh(y)) = x sigmoid(2 y)
    turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    result = gate / (1.0 + tl.exp(-turn)) * up
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `models.ops.silu_and_mul`; contiguous."""
    return _gated(gate_up, gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `models.ops.gelu_and_mul`; contiguous."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    columns = 1024
    if rows:
        _gate_kernel[(rows, triton.cdiv(width, columns))](
            gate_up, out, width, columns, gelu, num_warps=4, **_launch(gate_up, rows)
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "positions"])
def _rotary_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    k_cache,
    v_cache,
    slot_mapping,
    positions,
    page_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    WRITE: tl.constexpr,
    LOOK_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """qkv [T, (Q_HEADS + 2 KV_HEADS) * DIM] contiguous; cos and sin [T, DIM], sin's first half negated, or
    LOOK_UP: [positions, DIM], and positions int64 [T] says which row is a token's.

    WRITE: slot_mapping int64 [T], a token with a negative slot is not written; caches [pages, BLOCK_SIZE,
    KV_HEADS, DIM] with page_stride elements a page.
    """
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF_TILE)
    pair_ok = pairs < HALF
    rotated = heads < Q_HEADS + KV_HEADS
    mask = (heads < Q_HEADS + 2 * KV_HEADS)[:, None] & pair_ok[None, :]
    at = token * ((Q_HEADS + 2 * KV_HEADS) * DIM) + heads[:, None] * DIM + pairs[None, :]
    if PDL:
        gdc_launch_dependents()
    # Positions are older than the kernel before this one.
    spot = tl.load(positions + token) if LOOK_UP else token
    c1 = tl.load(cos + spot * DIM + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + spot * DIM + HALF + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + spot * DIM + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + spot * DIM + HALF + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
    first = tl.load(qkv + at, mask=mask, other=0.0)
    second = tl.load(qkv + at + HALF, mask=mask, other=0.0)
    x1 = first.to(tl.float32)
    x2 = second.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / DIM + eps)
        is_q = (heads < Q_HEADS)[:, None]
        q1 = tl.load(q_weight + pairs, mask=pair_ok, other=0.0).to(tl.float32)
        q2 = tl.load(q_weight + HALF + pairs, mask=pair_ok, other=0.0).to(tl.float32)
        k1 = tl.load(k_weight + pairs, mask=pair_ok, other=0.0).to(tl.float32)
        k2 = tl.load(k_weight + HALF + pairs, mask=pair_ok, other=0.0).to(tl.float32)
        x1 = x1 * inverse[:, None] * tl.where(is_q, q1[None, :], k1[None, :])
        x2 = x2 * inverse[:, None] * tl.where(is_q, q2[None, :], k2[None, :])
    kind = qkv.dtype.element_ty
    y1 = (x1 * c1 + x2 * s1).to(kind)
    y2 = (x2 * c2 + x1 * s2).to(kind)
    changed = mask & rotated[:, None]
    tl.store(qkv + at, y1, mask=changed)
    tl.store(qkv + at + HALF, y2, mask=changed)
    if WRITE:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            page = (slot // BLOCK_SIZE) * page_stride + (slot % BLOCK_SIZE) * (KV_HEADS * DIM)
            k_head = heads - Q_HEADS
            k_at = page + k_head[:, None] * DIM + pairs[None, :]
            k_mask = changed & (k_head >= 0)[:, None]
            tl.store(k_cache + k_at, y1, mask=k_mask)
            tl.store(k_cache + k_at + HALF, y2, mask=k_mask)
            v_at = k_at - KV_HEADS * DIM
            v_mask = mask & (k_head >= KV_HEADS)[:, None]
            tl.store(v_cache + v_at, first, mask=v_mask)
            tl.store(v_cache + v_at + HALF, second, mask=v_mask)


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
    """See `models.ops.rotary_heads`. qkv, contiguous, is overwritten: the results are views of it."""
    tokens, dim, total = qkv.shape[0], cos.shape[-1], num_heads + 2 * num_kv_heads
    heads = qkv.view(tokens, total, dim)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    k_cache, v_cache, slots = target if target is not None else (qkv, qkv, qkv)
    a_program = 4 if tokens < 128 else 8
    if tokens:
        _rotary_kernel[(tokens, triton.cdiv(total, a_program))](
            qkv,
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            k_cache,
            v_cache,
            slots,
            qkv if positions is None else positions,
            k_cache.stride(0),
            Q_HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=dim,
            HALF_TILE=triton.next_power_of_2(dim // 2),
            HEADS=a_program,
            BLOCK_SIZE=k_cache.shape[1],
            NORM=norms is not None,
            WRITE=target is not None,
            LOOK_UP=positions is not None,
            num_warps=4,
            **_launch(qkv, tokens),
        )
    split = num_heads + num_kv_heads
    return heads[:, :num_heads], heads[:, num_heads:split], heads[:, split:]
