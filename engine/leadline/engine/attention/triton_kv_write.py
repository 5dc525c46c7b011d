"""Write a step's keys and values into the paged cache (Triton), used by every GPU backend.

One program a token; a token whose slot is negative (padding of a captured graph) is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["write_kv"]


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_stride,
    v_stride,
    page_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    offs = tl.arange(0, WIDTH_TILE)
    mask = offs < WIDTH
    target = (slot // BLOCK_SIZE) * page_stride + (slot % BLOCK_SIZE) * WIDTH + offs
    tl.store(k_cache + target, tl.load(k + token * k_stride + offs, mask=mask), mask=mask)
    tl.store(v_cache + target, tl.load(v + token * v_stride + offs, mask=mask), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """k, v [T, heads, dim] (rows may be strided, as slices of a merged projection are); caches [blocks,
    block_size, heads, dim]; slot_mapping int64 [T]."""
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    width = heads * dim
    _write_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        BLOCK_SIZE=k_cache.shape[1],
        WIDTH=width,
        WIDTH_TILE=triton.next_power_of_2(width),
        num_warps=4 if width >= 512 else 1,
    )
