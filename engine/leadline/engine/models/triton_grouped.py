"""Products with weights in groups of columns (grouped.py) on CUDA: one row, few and many rows, and unpacking.

One row reads each weight once, and the time is that of its bytes and of turning them into numbers. A byte
of two 4-bit codes becomes two floats by three instructions, because the bits of a code are put where float32
keeps fractions of 256 and of 16:

    256.0 | low code << 15   is 256 + low        16.0 | high code << 19   is 16 + high

A piece of 16 bytes makes one sum, to which the zero point and these offsets are applied together:
s * (sum of (c + q) x - (c + z) * sum of x). More rows go through tensor cores: a tile of codes becomes
w = (q - z) * s in the activations' type, rounded once, as the reference dequantization does.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gemv", "gemv_kernel", "product", "product_kernel", "unpack", "unpack_kernel"]


class Grouped(Protocol):
    """The attributes of `grouped.GroupedWeight` that the kernels read."""

    kind: int
    rows: int
    columns: int
    half: int
    group: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    row_scale: torch.Tensor | None
    order: torch.Tensor | None


_INT4 = tl.constexpr(0)
_FP4 = tl.constexpr(1)
_INT8 = tl.constexpr(2)
_FP8 = tl.constexpr(3)
"""`grouped.Kind`: those below _INT8 have 4 bits, even ones are whole numbers."""


@triton.jit
def _fp4(codes):
    """e2m1 → float32: the bits of a code are those of a float16 with another exponent bias."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _offset_floats(packed, ASM: tl.constexpr):
    """Bytes → (256 + low code, 16 + high code) in float32."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t0, t1, t2, t3;
            shl.b32 t0, $8, 15;
            shl.b32 t1, $8, 7;
            shr.u32 t2, $8, 1;
            shr.u32 t3, $8, 9;
            lop3.b32 $0, t0, 0x00078000, 0x43800000, 0xEA;
            lop3.b32 $1, t1, 0x00078000, 0x43800000, 0xEA;
            lop3.b32 $2, t2, 0x00078000, 0x43800000, 0xEA;
            lop3.b32 $3, t3, 0x00078000, 0x43800000, 0xEA;
            lop3.b32 $4, t0, 0x00780000, 0x41800000, 0xEA;
            lop3.b32 $5, t1, 0x00780000, 0x41800000, 0xEA;
            lop3.b32 $6, t2, 0x00780000, 0x41800000, 0xEA;
            lop3.b32 $7, t3, 0x00780000, 0x41800000, 0xEA;
            }
            """,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [packed],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = (packed & 15).to(tl.float32) + 256.0
        high = (packed >> 4).to(tl.float32) + 16.0
    return low, high


@triton.jit
def _columns(start, WIDTH: tl.constexpr, PIECES: tl.constexpr, HALF: tl.constexpr, FOUR: tl.constexpr):
    """The first column of each piece of 16 bytes from byte `start` on, and which pieces lie in a row."""
    byte = start + tl.arange(0, PIECES) * 16
    column = (byte // HALF) * (2 * HALF) + byte % HALF if FOUR else byte
    return column, byte < (WIDTH // 2 if FOUR else WIDTH)


@triton.jit
def _inputs(x, norm_weight, column, inside, squares, NORM: tl.constexpr):
    """16 inputs from each column on, [PIECES, 16], times the norm's weight; and `squares` with theirs."""
    lanes = column[:, None] + tl.arange(0, 16)[None, :]
    value = tl.load(x + lanes, mask=inside[:, None], other=0.0).to(tl.float32)
    if NORM:
        squares += tl.sum(value * value, axis=1)
        value *= tl.load(norm_weight + lanes, mask=inside[:, None], other=0.0).to(tl.float32)
    return value, squares


@triton.jit
def _piece_sums(
    codes, value, total, offset, group_at, scales, zeros, keep, KIND: tl.constexpr, ZEROS: tl.constexpr
):
    """codes [OUTS, PIECES, 16] as floats, `offset` too large; value [PIECES, 16] and their sums, `total`;
    group_at [OUTS, PIECES] → scaled sums [OUTS, PIECES]."""
    sums = tl.sum(codes * value[None, :, :], axis=2)
    scale = tl.load(scales + group_at, mask=keep, other=0.0).to(tl.float32)
    if KIND % 2 == 0:
        zero = 8.0 if KIND == _INT4 else 128.0
        if ZEROS:
            zero = tl.load(zeros + group_at, mask=keep, other=0).to(tl.float32)
        sums -= (zero + offset) * total[None, :]
    return sums * scale


@triton.jit
def _tile_sums(
    tile, low, low_total, high, high_total, rows, column, inside, scales, zeros,
    WIDTH: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The part of the outputs that bytes [OUTS, PIECES, 16] and their inputs make: [OUTS, PIECES]."""
    keep = inside[None, :]
    group_at = rows[:, None] * (WIDTH // GROUP) + (column // GROUP)[None, :]
    if KIND < _INT8:
        if KIND == _INT4:
            first, second = _offset_floats(tile, ASM)
        else:
            first, second = _fp4(tile & 15), _fp4(tile >> 4)
        sums = _piece_sums(first, low, low_total, 256.0, group_at, scales, zeros, keep, KIND, ZEROS)
        group_at += HALF // GROUP
        sums += _piece_sums(second, high, high_total, 16.0, group_at, scales, zeros, keep, KIND, ZEROS)
    else:
        numbers = tile.to(tl.float32)
        sums = _piece_sums(numbers, low, low_total, 0.0, group_at, scales, zeros, keep, KIND, ZEROS)
    return sums


@triton.jit
def gemv_kernel(
    x, values, scales, zeros, row_scales, norm_weight, residual, out, eps, num_out,
    WIDTH: tl.constexpr, BYTES: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, OUTS: tl.constexpr,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALED: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: outputs [i * OUTS, (i + 1) * OUTS) of one row x [WIDTH]; the weight has num_out rows, twice
    as many if GATED. A pass over the width takes BYTES bytes of a row. norm_weight [WIDTH] if NORM; residual
    [num_out] if ADD, may be out."""
    FOUR: tl.constexpr = KIND < _INT8
    LINE: tl.constexpr = WIDTH // 2 if FOUR else WIDTH
    PIECES: tl.constexpr = BYTES // 16
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    live = outs < num_out
    rows = tl.minimum(outs, num_out - 1).to(tl.int64)
    lower = rows + num_out
    places = tl.arange(0, PIECES)[:, None] * 16 + tl.arange(0, 16)[None, :]
    at = values + rows[:, None, None] * LINE + places[None, :, :]
    second = num_out.to(tl.int64) * LINE
    inside = (places < LINE)[None, :, :]
    tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_tile = tl.load(at + second, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([OUTS, PIECES], tl.float32)
    up_total = tl.zeros([OUTS, PIECES], tl.float32)
    squares = tl.zeros([PIECES], tl.float32)
    for start in tl.static_range(0, LINE, BYTES):
        if start > 0:
            inside = (start + places < LINE)[None, :, :]
            tile = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_tile = tl.load(at + second + start, mask=inside, other=0.0, eviction_policy="evict_first")
        column, held = _columns(start, WIDTH, PIECES, HALF, FOUR)
        low, squares = _inputs(x, norm_weight, column, held, squares, NORM)
        high = low
        if FOUR:
            high, squares = _inputs(x, norm_weight, column + HALF, held, squares, NORM)
        low_total, high_total = tl.sum(low, axis=1), tl.sum(high, axis=1)
        total += _tile_sums(
            tile, low, low_total, high, high_total, rows, column, held, scales, zeros,
            WIDTH, HALF, GROUP, KIND, ZEROS, ASM,
        )  # fmt: skip
        if GATED:
            up_total += _tile_sums(
                up_tile, low, low_total, high, high_total, lower, column, held, scales, zeros,
                WIDTH, HALF, GROUP, KIND, ZEROS, ASM,
            )  # fmt: skip
    result = tl.sum(total, axis=1)
    up_result = tl.sum(up_total, axis=1)
    if ROW_SCALED:
        result *= tl.load(row_scales + rows)
        if GATED:
            up_result *= tl.load(row_scales + lower)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
        result *= inverse
        up_result *= inverse
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up_result
    if ADD:
        result += tl.load(residual + outs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + outs, result.to(out.dtype.element_ty), mask=live)


def gemv(
    x: torch.Tensor,
    weight: Grouped,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cut: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """x [1, columns] (contiguous, in the order of the weight's columns) times the weight → [1, rows], or
    [1, rows / 2] if `gated`; as triton_gemv.gemv. cut: (bytes of a row a pass, outputs a program, warps)."""
    num_out = weight.rows // 2 if gated else weight.rows
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty((1, num_out))
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    line = weight.values.shape[1]
    count, outs, warps = cut or _gemv_cut(line, num_out, gated)
    gemv_kernel[(triton.cdiv(num_out, outs),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.row_scale is None else weight.row_scale,
        norm_weight,
        out,
        out,
        eps,
        num_out,
        WIDTH=weight.columns,
        BYTES=count,
        HALF=weight.half,
        GROUP=weight.group,
        OUTS=outs,
        KIND=int(weight.kind),
        ZEROS=weight.zeros is not None,
        ROW_SCALED=weight.row_scale is not None,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        ASM=x.is_cuda,
        PDL=x.is_cuda,
        num_warps=warps,
        **({"launch_pdl": True} if x.is_cuda else {}),
    )
    return out


def _gemv_cut(line: int, num_out: int, gated: bool) -> tuple[int, int, int]:
    """Found by trial on an H200 with the products of Qwen3-8B in 4 bits (gpu_grouped.py --tune)."""
    if gated:
        cut = 512, 2, 2
    elif line > 4096:
        cut = 512, 4, 2
    else:
        cut = (1024, 8, 4) if num_out <= 4096 else (512, 4, 4)
    return min(triton.next_power_of_2(line), cut[0]), *cut[1:]


@triton.jit
def _spread(groups, OUTS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """[OUTS, HALF / GROUP], a number a group → [OUTS, HALF], one a column."""
    wide = tl.broadcast_to(groups[:, :, None], (OUTS, HALF // GROUP, GROUP))
    return tl.reshape(wide, (OUTS, HALF))


_SCALE_INT4 = """
{
.reg .b32 t, u, a, b, c, d, one, zero;
mov.b32 one, ONE;
mov.b32 zero, 0x80008000;
and.b32 t, $4, 0x0F0F0F0F;
shr.u32 u, $4, 4;
and.b32 u, u, 0x0F0F0F0F;
prmt.b32 a, t, MAGIC, 0x4140;
prmt.b32 b, t, MAGIC, 0x4342;
prmt.b32 c, u, MAGIC, 0x4140;
prmt.b32 d, u, MAGIC, 0x4342;
FMA a, a, one, $5;
FMA b, b, one, $6;
FMA c, c, one, $9;
FMA d, d, one, $10;
FMA $0, a, $7, zero;
FMA $1, b, $8, zero;
FMA $2, c, $11, zero;
FMA $3, d, $12, zero;
}
"""
"""Four bytes, $4, to four weights of low and four of high codes: see `_scaled_int4`."""


def _with(magic: str, one: str, fma: str) -> tl.constexpr:
    return tl.constexpr(_SCALE_INT4.replace("MAGIC", magic).replace("ONE", one).replace("FMA", fma))


_SCALE_BFLOAT16 = _with("0x43434343", "0x3F803F80", "fma.rn.bf16x2")
_SCALE_FLOAT16 = _with("0x64646464", "0x3C003C00", "fma.rn.f16x2")


@triton.jit
def _scaled_int4(packed, low_zero, low_scale, high_zero, high_scale, dtype: tl.constexpr):
    """Bytes [OUTS, HALF] → the weights of the low and of the high codes in dtype, which all others have too.

    A byte of a code behind 0x43 is 128 + code in bfloat16, behind 0x64 1024 + code in float16. `zero` is
    minus that offset and the zero point: what is left is exact, and only the product with the scale rounds.
    """
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _SCALE_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, low_zero, low_scale, high_zero, high_scale],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            _SCALE_FLOAT16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [packed, low_zero, low_scale, high_zero, high_scale],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def _int4_scales(
    group_at, scales, zeros, OUTS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """What `_scaled_int4` takes of a half: zero and scale, [OUTS, HALF] each."""
    OFFSET: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    scale = tl.load(scales + group_at)
    if ZEROS:
        zero = -OFFSET - tl.load(zeros + group_at).to(tl.float32)
    else:
        zero = tl.full(group_at.shape, -OFFSET - 8.0, tl.float32)
    return _spread(zero.to(dtype), OUTS, HALF, GROUP), _spread(scale, OUTS, HALF, GROUP)


@triton.jit
def _decoded(
    codes, group_at, scales, zeros,
    OUTS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Codes [OUTS, HALF] → weights in dtype. group_at [OUTS, HALF / GROUP]: places of their scales."""
    scale = tl.load(scales + group_at).to(tl.float32)
    number = _fp4(codes) if KIND == _FP4 else codes.to(tl.float32)
    if KIND % 2 == 0:
        zero = 8.0 if KIND == _INT4 else 128.0
        if ZEROS:
            zero = _spread(tl.load(zeros + group_at).to(tl.float32), OUTS, HALF, GROUP)
        number -= zero
    return (number * _spread(scale, OUTS, HALF, GROUP)).to(dtype)


@triton.jit
def _block(
    at, group_at, scales, zeros,
    OUTS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The weights of a block of columns, in two halves [OUTS, HALF]. at: its bytes; group_at: the places of
    the first half's scales."""
    HELD: tl.constexpr = HALF // GROUP
    if KIND < _INT8:
        packed = tl.load(at, eviction_policy="evict_first")
        if KIND == _INT4 and ASM and scales.dtype.element_ty == dtype:
            low_zero, low_scale = _int4_scales(group_at, scales, zeros, OUTS, HALF, GROUP, ZEROS, dtype)
            high_zero, high_scale = _int4_scales(
                group_at + HELD, scales, zeros, OUTS, HALF, GROUP, ZEROS, dtype
            )
            low, high = _scaled_int4(packed, low_zero, low_scale, high_zero, high_scale, dtype)
        else:
            low = _decoded(packed & 15, group_at, scales, zeros, OUTS, HALF, GROUP, KIND, ZEROS, dtype)
            group_at += HELD
            high = _decoded(packed >> 4, group_at, scales, zeros, OUTS, HALF, GROUP, KIND, ZEROS, dtype)
    else:
        first = tl.load(at, eviction_policy="evict_first")
        second = tl.load(at + HALF, eviction_policy="evict_first")
        low = _decoded(first, group_at, scales, zeros, OUTS, HALF, GROUP, KIND, ZEROS, dtype)
        group_at += HELD
        high = _decoded(second, group_at, scales, zeros, OUTS, HALF, GROUP, KIND, ZEROS, dtype)
    return low, high


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, values, scales, zeros, row_scales, out, rows, stride, num_out,
    WIDTH: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, block of rows). x [rows, WIDTH] with `stride` elements a row; out [rows,
    num_out]. Weights are the left operand, so that few rows are the short side of the tile."""
    FOUR: tl.constexpr = KIND < _INT8
    STEP: tl.constexpr = HALF if FOUR else 2 * HALF
    LINE: tl.constexpr = WIDTH // 2 if FOUR else WIDTH
    GROUPS: tl.constexpr = WIDTH // GROUP
    HELD: tl.constexpr = HALF // GROUP
    dtype: tl.constexpr = x.dtype.element_ty
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    lanes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(outs, num_out - 1).to(tl.int64)
    columns = tl.arange(0, HALF)
    at = values + safe[:, None] * LINE + columns[None, :]
    group_at = safe[:, None] * GROUPS + tl.arange(0, HELD)[None, :]
    x_at = x + tl.minimum(lanes, rows - 1).to(tl.int64)[:, None] * stride + columns[None, :]
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for block in tl.range(0, WIDTH // (2 * HALF), num_stages=STAGES):
        low, high = _block(
            at + block * STEP, group_at + block * (2 * HELD), scales, zeros,
            OUTS, HALF, GROUP, KIND, ZEROS, dtype, ASM,
        )  # fmt: skip
        first = tl.load(x_at + block * (2 * HALF))
        total = tl.dot(low, tl.trans(first), total)
        second = tl.load(x_at + block * (2 * HALF) + HALF)
        total = tl.dot(high, tl.trans(second), total)
    if ROW_SCALED:
        total *= tl.load(row_scales + safe)[:, None]
    place = lanes.to(tl.int64)[None, :] * num_out + outs[:, None]
    mask = (outs < num_out)[:, None] & (lanes < rows)[None, :]
    tl.store(out + place, total.to(dtype), mask=mask)


def product(x: torch.Tensor, weight: Grouped, cut: tuple[int, int, int, int] | None = None) -> torch.Tensor:
    """x [T, columns], whose rows are contiguous, times the weight → [T, rows]. cut: (outputs and rows of x a
    program, stages, warps)."""
    rows = x.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty((rows, weight.rows))
    if not rows:
        return out
    outs, tile, stages, warps = cut or _cut(rows, weight.rows)
    grid = (triton.cdiv(weight.rows, outs), triton.cdiv(rows, tile))
    product_kernel[grid](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.row_scale is None else weight.row_scale,
        out,
        rows,
        x.stride(0),
        weight.rows,
        WIDTH=weight.columns,
        HALF=weight.half,
        GROUP=weight.group,
        OUTS=outs,
        ROWS=tile,
        STAGES=stages,
        KIND=int(weight.kind),
        ZEROS=weight.zeros is not None,
        ROW_SCALED=weight.row_scale is not None,
        ASM=x.is_cuda,
        num_warps=warps,
    )
    return out


def _cut(rows: int, num_out: int) -> tuple[int, int, int, int]:
    """Small tiles until every multiprocessor has a program; then larger ones, which decode less often."""
    if rows <= 64:
        return 32 if num_out < 8192 else 64, max(16, triton.next_power_of_2(rows)), 4, 4
    return (64, 64, 3, 4) if rows <= 128 else (128, 128, 2, 8)


@triton.jit
def unpack_kernel(
    values, scales, zeros, row_scales, out, num_out,
    WIDTH: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, OUTS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, ROW_SCALED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of columns): their weights, in out [num_out, WIDTH]."""
    FOUR: tl.constexpr = KIND < _INT8
    STEP: tl.constexpr = HALF if FOUR else 2 * HALF
    LINE: tl.constexpr = WIDTH // 2 if FOUR else WIDTH
    HELD: tl.constexpr = HALF // GROUP
    dtype: tl.constexpr = tl.float32 if ROW_SCALED else out.dtype.element_ty
    block = tl.program_id(1)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    live = (outs < num_out)[:, None]
    safe = tl.minimum(outs, num_out - 1).to(tl.int64)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    low, high = _block(
        values + safe * LINE + columns + block * STEP,
        safe * (WIDTH // GROUP) + tl.arange(0, HELD)[None, :] + block * (2 * HELD),
        scales, zeros, OUTS, HALF, GROUP, KIND, ZEROS, dtype, ASM,
    )  # fmt: skip
    if ROW_SCALED:
        scale = tl.load(row_scales + safe)
        low *= scale
        high *= scale
    at = out + safe * WIDTH + columns + block * (2 * HALF)
    tl.store(at, low.to(out.dtype.element_ty), mask=live)
    tl.store(at + HALF, high.to(out.dtype.element_ty), mask=live)


def unpack(weight: Grouped, dtype: torch.dtype) -> torch.Tensor:
    """The weight [rows, columns] in `dtype`, its columns as they lie there."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.values.device)
    outs = 16
    unpack_kernel[(triton.cdiv(weight.rows, outs), weight.columns // (2 * weight.half))](
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.row_scale is None else weight.row_scale,
        out,
        weight.rows,
        WIDTH=weight.columns,
        HALF=weight.half,
        GROUP=weight.group,
        OUTS=outs,
        KIND=int(weight.kind),
        ZEROS=weight.zeros is not None,
        ROW_SCALED=weight.row_scale is not None,
        ASM=weight.values.is_cuda,
        num_warps=4,
    )
    return out
