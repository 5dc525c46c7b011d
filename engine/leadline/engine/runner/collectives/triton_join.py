"""Sums over ranks as Triton kernels that read the other ranks' memory, fused with what follows a sum.

A matrix product leaves its partial sums in memory that all ranks can address, and one kernel does the rest:

    one shot   every rank reads all partial sums of a row                  residual += sum; x = norm(residual)
    two shots  a row belongs to one rank, which reads, adds, norms,        the residual of a row is its
               and writes x into every rank's memory                       owner's only

    rank 0  partial ──┐ ┌──▶ sum, add, norm        sums are in the order of ranks, so that all ranks
    rank 1  partial ──┴─┴──▶ sum, add, norm        have the same bits

Program i of a kernel starts when program i of that kernel runs on every rank (`_meet`): then the products
before it are through everywhere. It counts its meetings in memory of its own and tells the others by one
store each; nothing is ever reset, so kernels in graphs and eager ones may follow each other in any order that
is the same on all ranks. Memory is reused two kernels later: a rank that takes part in the kernel in between
has ended the first.

A grid never exceeds MAX_PROGRAMS, few enough to be on the GPU at once, since programs wait for each other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["MAX_PROGRAMS", "gather_kernel", "join_kernel"]

MAX_PROGRAMS = 512

_PATIENCE = tl.constexpr(2048)
"""Looks at a flag between two looks at the abort word, which is in the host's memory."""


@triton.jit
def _meet(flags, epoch, abort, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until this program has met its namesakes on all ranks `epoch` times, or until `abort` is set.

    flags int64 [SIZE]: each rank's flags by address, int64 [MAX_PROGRAMS, SIZE] by program and sender.
    """
    at = tl.program_id(0) * SIZE
    for step in tl.static_range(1, SIZE):
        theirs = tl.load(flags + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + at + RANK, epoch, sem="release", scope="sys")
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int64))
    for step in tl.static_range(1, SIZE):
        flag = own + at + (RANK + step) % SIZE
        looks = 0
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen < epoch:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
            if looks % _PATIENCE == 0:  # noqa: SIM102 - no short circuits in Triton
                if tl.load(abort, volatile=True) != 0:
                    seen = epoch


@triton.jit
def _total(partials, at, mask, kind: tl.constexpr, SIZE: tl.constexpr):
    """The sum over ranks, in float32, of what lies at `at` in each rank's memory."""
    base = tl.multiple_of(tl.load(partials).to(tl.pointer_type(kind)), 16)
    total = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        base = tl.multiple_of(tl.load(partials + rank).to(tl.pointer_type(kind)), 16)
        total += tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    partials, outs, residual, weight, out, flags, epochs, abort, eps, rows,
    WIDTH: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, TWO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partials, outs int64 [SIZE]: addresses of [rows, WIDTH] on each rank. TWO: x goes to `outs`.

    ADD: residual [rows, WIDTH] += sum. NORM: out = norm(residual) * weight. Neither: out = sum.
    """
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    mask = lanes < WIDTH
    kind: tl.constexpr = out.dtype.element_ty
    if PDL:
        # What the kernel before this one makes is the partial sums; all else was there when it started.
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epochs + program) + 1
    _meet(flags, epoch, abort, RANK, SIZE)
    if NORM:
        scale = tl.load(weight + lanes, mask=mask, other=0.0).to(tl.float32)
    for index in range(program, (rows - RANK + SIZE - 1) // SIZE if TWO else rows, tl.num_programs(0)):
        row = index * SIZE + RANK if TWO else index
        at = row * WIDTH + lanes
        total = _total(partials, at, mask, kind, SIZE)
        if ADD:
            total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        value = total.to(kind)
        if ADD:
            tl.store(residual + at, value, mask=mask)
        if NORM:
            wide = value.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
            value = (wide * inverse * scale).to(kind)
        if TWO:
            for step in tl.static_range(SIZE):
                base = tl.load(outs + (RANK + step) % SIZE).to(tl.pointer_type(kind))
                tl.store(tl.multiple_of(base, 16) + at, value, mask=mask)
        elif NORM or not ADD:
            tl.store(out + at, value, mask=mask)
    if TWO:
        # All rows that others own are here before this kernel ends.
        tl.debug_barrier()
        epoch += 1
        _meet(flags, epoch, abort, RANK, SIZE)
    tl.store(epochs + program, epoch)


@triton.jit(do_not_specialize=["rows"])
def gather_kernel(
    parts, out, flags, epochs, abort, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """out [rows, WIDTH], STRIDE apart = | rank 0's [rows, COLUMNS] | rank 1's | ..., the last one cut.

    parts int64 [SIZE]: addresses.
    """
    program = tl.program_id(0).to(tl.int64)
    TILES: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    kind: tl.constexpr = out.dtype.element_ty
    lanes = tl.arange(0, TILE)
    epoch = tl.load(epochs + program) + 1
    _meet(flags, epoch, abort, RANK, SIZE)
    for index in range(program, rows * TILES, tl.num_programs(0)):
        row = index // TILES
        columns = (index % TILES) * TILE + lanes
        for step in tl.static_range(SIZE):
            rank = (RANK + step) % SIZE
            base = tl.multiple_of(tl.load(parts + rank).to(tl.pointer_type(kind)), 16)
            mask = (columns < COLUMNS) & (rank * COLUMNS + columns < WIDTH)
            value = tl.load(base + row * COLUMNS + columns, mask=mask)
            tl.store(out + row * STRIDE + rank * COLUMNS + columns, value, mask=mask)
    tl.store(epochs + program, epoch)
