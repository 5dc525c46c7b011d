"""Greedy argmax and temperature draws as Triton kernels that never write noise to memory.

    logits [R, V] ──peak──▶ largest logit and its id, a part of the vocabulary a program
                  ──draw──▶ best of (logit - largest) / temperature + Gumbel noise (greedy rows: none)
                  ──pick──▶ the best of the parts → tokens [R], last_token[slot]

The noise is that of noise.py, bit for bit, and scores are computed in the same order of roundings as
`Sampler._draw` computes them: a row draws the same token here and there. Rows with top-k, top-p, min-p,
penalties, bias or masks are not for these kernels.

The two accurate logarithms of an entry's noise cost more than all the rest, so a tile first bounds its scores
from above with one fast logarithm (E = -log(1 - u) >= u, hence gumbel <= -log u), and does the accurate work
only if the bound exceeds the best score so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["Drawer", "draw_kernel", "peak_kernel", "pick_kernel", "random_bits_tile", "row_key"]

_MAX_PARTS = 64
_TILE = 2048

_TO_UNIT = tl.constexpr(2.0**-31)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SLACK = tl.constexpr(1e-3)
"""More than the rounding of the fast logarithm and of the sum in a bound."""
_SHRINK = tl.constexpr(1.0 - 2.0**-20)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """`noise.row_keys` of one row; seed and position int64, the key uint64."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    wide_seed = seed.to(tl.uint64, bitcast=True)
    return _mix64(_mix64(wide_seed + golden) + position.to(tl.uint64, bitcast=True) * golden)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits_tile(key, entries):
    """`noise.random_bits` of one row: key uint64, entries int32 [N] → uint32 [N]."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = entries.to(tl.uint32, bitcast=True) * 0x9E3779B1 + low
    return _mix32(_mix32(x) + high)


@triton.jit
def _unit_tile(key, entries):
    """`noise.uniform` of one row."""
    bits = random_bits_tile(key, entries) & 0x7FFFFFFF
    unit = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * _TO_UNIT
    return tl.minimum(unit, _BELOW_ONE)


@triton.jit(do_not_specialize=["stride"])
def peak_kernel(
    logits, part_value, part_id, stride, VOCAB: tl.constexpr, PARTS: tl.constexpr, MAX_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the largest logit of the part and the lowest id that has it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    size: tl.constexpr = (VOCAB + PARTS * TILE - 1) // (PARTS * TILE) * TILE
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], VOCAB, tl.int32)
    for start in range(part * size, tl.minimum(part * size + size, VOCAB), TILE):
        entries = start + lanes
        value = tl.load(logits + row * stride + entries, mask=entries < VOCAB, other=float("-inf"))
        value = value.to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, entries, where)
    top = tl.max(best, axis=0)
    tl.store(part_value + row * MAX_PARTS + part, top)
    tl.store(part_id + row * MAX_PARTS + part, tl.min(tl.where(best == top, where, VOCAB), axis=0))


@triton.jit(do_not_specialize=["stride"])
def draw_kernel(
    logits, slots, positions, random, temperature, seed, peak_value, part_value, part_id, stride,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, MAX_PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the best noisy score of the part and its id. Rows with random == 0 do nothing."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if tl.load(random + row) != 0:
        slot = tl.load(slots + row)
        key = row_key(tl.load(seed + slot), tl.load(positions + row))
        divisor = tl.load(temperature + slot)
        inverse = tl.minimum(1.0 / divisor, 3e38)
        peak = tl.max(tl.load(peak_value + row * MAX_PARTS + tl.arange(0, PARTS)), axis=0)
        size: tl.constexpr = (VOCAB + PARTS * TILE - 1) // (PARTS * TILE) * TILE
        lanes = tl.arange(0, TILE)
        best = float("-inf")
        where = VOCAB
        for start in range(part * size, tl.minimum(part * size + size, VOCAB), TILE):
            entries = start + lanes
            live = entries < VOCAB
            value = tl.load(logits + row * stride + entries, mask=live, other=float("-inf")).to(tl.float32)
            unit = _unit_tile(key, entries)
            # 1 / temperature is rounded, the shrunk factor makes the product too large rather than too small.
            bound = (value - peak) * inverse * _SHRINK - tl.log(unit)
            if tl.max(bound, axis=0) + _SLACK > best:
                scaled = tl.div_rn(value - peak, tl.zeros_like(value) + divisor)
                noise = -libdevice.log(-libdevice.log1p(-unit))
                score = tl.where(live, scaled + noise, float("-inf"))
                top = tl.max(score, axis=0)
                if top > best:
                    best = top
                    where = tl.min(tl.where(score == top, entries, VOCAB), axis=0)
        tl.store(part_value + row * MAX_PARTS + part, best)
        tl.store(part_id + row * MAX_PARTS + part, where)


@triton.jit
def pick_kernel(
    slots, random, peak_value, peak_id, part_value, part_id, tokens, last_token, VOCAB: tl.constexpr,
    PARTS: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Program row: the token; rows with a slot also set their slot's last token (slot -1 is padding)."""
    row = tl.program_id(0)
    at = row * MAX_PARTS + tl.arange(0, PARTS)
    if tl.load(random + row) != 0:
        value = tl.load(part_value + at)
        ids = tl.load(part_id + at)
    else:
        value = tl.load(peak_value + at)
        ids = tl.load(peak_id + at)
    top = tl.max(value, axis=0)
    # A row of NaN has no best entry; its token must be one that can be looked up all the same.
    token = tl.min(tl.where(value == top, ids, VOCAB - 1), axis=0)
    token = tl.minimum(token, VOCAB - 1)
    slot = tl.load(slots + row)
    tl.store(tokens + row, token.to(tl.int64))
    if slot >= 0:
        tl.store(last_token + slot, token.to(tl.int64))


class Drawer:
    """The three kernels with their workspace, for up to max_rows rows; fit for a CUDA graph."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.values = torch.empty((2, max_rows, _MAX_PARTS), dtype=torch.float32, device=device)
        self.ids = torch.empty((2, max_rows, _MAX_PARTS), dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        random: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        tokens: torch.Tensor,
        last_token: torch.Tensor,
    ) -> None:
        """logits [R, V] of any float dtype; slots, positions (where the drawn token will stand) and random
        (0: greedy) int64 [R]; temperature float32 and seed int64 by slot. Writes tokens int64 [R] and
        last_token int64 at each row's slot. A row of slot -1 must have random 0."""
        rows = logits.shape[0]
        parts = 4
        while parts < _MAX_PARTS and parts * rows < 512:
            parts *= 2
        (peaks, scores), (peak_ids, score_ids) = self.values, self.ids
        sizes = {"VOCAB": self.vocab_size, "PARTS": parts, "MAX_PARTS": _MAX_PARTS, "TILE": _TILE}
        stride = logits.stride(0)
        peak_kernel[(rows, parts)](logits, peaks, peak_ids, stride, **sizes, num_warps=4)
        draw_kernel[(rows, parts)](
            logits, slots, positions, random, temperature, seed, peaks, scores, score_ids, stride, **sizes,
            num_warps=4,
        )  # fmt: skip
        pick_kernel[(rows,)](
            slots, random, peaks, peak_ids, scores, score_ids, tokens, last_token,
            self.vocab_size, parts, _MAX_PARTS, num_warps=1,
        )  # fmt: skip
