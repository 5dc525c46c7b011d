"""Greedy argmax and temperature draws as Triton kernels that never write noise to memory.

    logits [R, V] ──scan──▶ for each part of the vocabulary: largest logit and its id, and the largest lower
                            bound of a noisy score; for each tile of it: an upper bound of its noisy scores
                  ──draw──▶ exact noisy scores, (logit - largest) / temperature + Gumbel noise, of the tiles
                            whose upper bound reaches the row's lower bound: one or two
                            the best of them → tokens [R], last_token[slot]

The noise is that of noise.py, bit for bit, and scores are computed in the same order of roundings as
`Sampler._draw` computes them: a row draws the same token here and there. Rows with top-k, top-p, min-p,
penalties, bias or masks are not for these kernels.

The two accurate logarithms of an entry's noise cost more than all the rest, so the scan has to do with one
approximate logarithm: with E = -log(1 - u), u <= E <= u / (1 - u), hence

    -log u - u - u²  <=  -log u + log(1 - u)  <=  gumbel = -log E  <=  -log u      (the first for u <= 1/2)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["Drawer", "draw_kernel", "random_bits_tile", "row_key", "scan_kernel"]

_MAX_PARTS = 64
_TILE = 2048
_PROGRAMS = 2048
"""Programs that the parts are cut for."""

_TO_UNIT = tl.constexpr(2.0**-31)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SLACK = tl.constexpr(1e-3)
"""More than the rounding of the approximate logarithms and of the sum in a bound."""
_ROUNDING = tl.constexpr(2.0**-20)
"""More than the relative error of logit / temperature, as a bound computes it."""
_LN2 = tl.constexpr(0.6931471805599453)


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


@triton.jit
def _log(x):
    """Natural logarithm to about 2**-22, absolute near 1."""
    two = tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return two * _LN2


@triton.jit(do_not_specialize=["stride"])
def scan_kernel(
    logits, slots, positions, random, temperature, seed, part_value, part_id, part_low, tile_high, stride,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, MAX_PARTS: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the largest logit of the part and the lowest id that has it; if random != 0,
    bounds of logit / temperature + noise."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    is_random = tl.load(random + row) != 0
    slot = tl.maximum(tl.load(slots + row), 0)
    key = row_key(tl.load(seed + slot), tl.load(positions + row))
    inverse = tl.minimum(1.0 / tl.load(temperature + slot), 3e38)
    size: tl.constexpr = (VOCAB + PARTS * TILE - 1) // (PARTS * TILE) * TILE
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], VOCAB, tl.int32)
    low = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(part * size, tl.minimum(part * size + size, VOCAB), TILE):
        entries = start + lanes
        value = tl.load(logits + row * stride + entries, mask=entries < VOCAB, other=float("-inf"))
        value = value.to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, entries, where)
        if is_random:
            unit = _unit_tile(key, entries)
            scaled = value * inverse
            margin = tl.abs(scaled) * _ROUNDING
            noise = -_log(unit)
            # -inf has a margin of inf: keep their difference, NaN, out of the maximum.
            high = tl.where(value > float("-inf"), scaled + margin + noise, float("-inf"))
            tl.store(tile_high + row * TILES + start // TILE, tl.max(high, axis=0))
            below = scaled - margin + noise - unit - unit * unit
            low = tl.maximum(low, tl.where((value > float("-inf")) & (unit <= 0.5), below, float("-inf")))
    top = tl.max(best, axis=0)
    tl.store(part_value + row * MAX_PARTS + part, top)
    tl.store(part_id + row * MAX_PARTS + part, tl.min(tl.where(best == top, where, VOCAB), axis=0))
    tl.store(part_low + row * MAX_PARTS + part, tl.max(low, axis=0))


@triton.jit(do_not_specialize=["stride"])
def draw_kernel(
    logits, slots, positions, random, temperature, seed, peak_value, peak_id, part_low, tile_high, part_value,
    part_id, arrived, tokens, last_token, stride, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the best noisy score of the part and its id; the row's last program picks the best
    of the parts (of the largest logits, if random == 0). A row with a slot sets its slot's last token too
    (slot -1 is padding). arrived int32 [rows], zero before and after."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    gdc_wait()
    at = row * MAX_PARTS + tl.arange(0, PARTS)
    slot = tl.load(slots + row)
    is_random = tl.load(random + row) != 0
    if is_random:
        least = tl.max(tl.load(part_low + at), axis=0) - 2 * _SLACK
        peak = tl.max(tl.load(peak_value + at), axis=0)
        size: tl.constexpr = (VOCAB + PARTS * TILE - 1) // (PARTS * TILE) * TILE
        lanes = tl.arange(0, TILE)
        best = float("-inf")
        where = VOCAB
        for start in range(part * size, tl.minimum(part * size + size, VOCAB), TILE):
            if tl.load(tile_high + row * TILES + start // TILE) >= least:
                key = row_key(tl.load(seed + slot), tl.load(positions + row))
                divisor = tl.load(temperature + slot)
                entries = start + lanes
                live = entries < VOCAB
                value = tl.load(logits + row * stride + entries, mask=live, other=float("-inf")).to(
                    tl.float32
                )
                scaled = tl.div_rn(value - peak, tl.zeros_like(value) + divisor)
                noise = -libdevice.log(-libdevice.log1p(-_unit_tile(key, entries)))
                score = tl.where(live, scaled + noise, float("-inf"))
                top = tl.max(score, axis=0)
                if top > best:
                    best = top
                    where = tl.min(tl.where(score == top, entries, VOCAB), axis=0)
        tl.store(part_value + row * MAX_PARTS + part, best)
        tl.store(part_id + row * MAX_PARTS + part, where)
    # All threads' stores come before the release of the one atomic (barrier, then acq_rel).
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + row, 0)
        if is_random:
            value = tl.load(part_value + at, cache_modifier=".cg")
            ids = tl.load(part_id + at, cache_modifier=".cg")
        else:
            value = tl.load(peak_value + at)
            ids = tl.load(peak_id + at)
        top = tl.max(value, axis=0)
        # A row of NaN has no best entry; its token must be one that can be looked up all the same.
        token = tl.min(tl.where(value == top, ids, VOCAB - 1), axis=0)
        token = tl.minimum(token, VOCAB - 1)
        tl.store(tokens + row, token.to(tl.int64))
        if slot >= 0:
            tl.store(last_token + slot, token.to(tl.int64))


class Drawer:
    """The two kernels with their workspace, for up to max_rows rows; fit for a CUDA graph."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.tiles = triton.cdiv(vocab_size, _TILE)
        self.values = torch.empty((3, max_rows, _MAX_PARTS), dtype=torch.float32, device=device)
        self.ids = torch.empty((2, max_rows, _MAX_PARTS), dtype=torch.int32, device=device)
        self.high = torch.empty((max_rows, self.tiles), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

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
        while parts < _MAX_PARTS and parts * rows < _PROGRAMS:
            parts *= 2
        peaks, lows, scores = self.values
        peak_ids, score_ids = self.ids
        row = (logits, slots, positions, random, temperature, seed)
        more = {"VOCAB": self.vocab_size, "PARTS": parts, "MAX_PARTS": _MAX_PARTS, "TILES": self.tiles}
        more |= {"TILE": _TILE, "num_warps": 4, "launch_pdl": True}
        stride = logits.stride(0)
        scan_kernel[(rows, parts)](*row, peaks, peak_ids, lows, self.high, stride, **more)
        draw_kernel[(rows, parts)](
            *row, peaks, peak_ids, lows, self.high, scores, score_ids, self.arrived, tokens, last_token,
            stride, **more,
        )  # fmt: skip
