"""Large sums over ranks, moved by the GPUs' copy engines while the processors compute on.

    stream        product of A | product of B ──────────── | sum, add, norm of A | product of A ...
    to each rank               └▶ copy of A's terms ▶ flag | copy of B's terms ▶ flag

A rank copies its terms into a box in each other rank's memory, and then the number of the sum into a flag
beside it; who needs the sum waits for the flags in the kernel that adds and norms (triton_join.py). Neither
copy needs a multiprocessor, and the products leave none free: NCCL's kernels wait for one.

A half of a step's tokens (models/interleave.py) has a box for o's terms and one for down's, in turns. That is
enough: whoever sends again to one has had this rank's terms of the other, sent after the first was read.

Every rank sends all its terms to every other one. For two ranks that is what a ring moves as well; for four
it is twice as much, so more than that are left to NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from leadline.engine.models.parallel import Sum

if TYPE_CHECKING:
    from leadline.engine.runner.parallel.fabric import Fabric, FabricSpec
    from leadline.engine.runner.parallel.group import RankGroup

__all__ = ["MAX_RANKS", "SumExchange", "make_exchange"]

MAX_RANKS = 4
_HALVES = 2
_TURNS = (Sum.O, Sum.DOWN)
_NUMBERS = 1 << 16
"""Sums are numbered modulo this; ranks are never more than two apart."""
_LINE = 256


def make_exchange(group: RankGroup, spec: FabricSpec, fabric: Fabric) -> SumExchange | None:
    """For steps that are too large for the fabric; None where there are none, or too many ranks."""
    if group.size > MAX_RANKS or spec.max_tokens <= fabric.max_tokens:
        return None
    made = SumExchange(group, spec, fabric.aborting)
    group.least(0)  # flags are zero everywhere
    return made


@dataclass(slots=True)
class _Sent:
    """A sum under way."""

    terms: torch.Tensor
    half: int
    turn: int
    number: int
    left: list[torch.cuda.Event]
    """When this rank's terms have been read; they must not be freed before."""


class SumExchange:
    """`models.parallel.Exchange` over symmetric memory. Every call is made by all ranks in the same order; no
    call is captured in a CUDA graph, since sums are numbered by the host."""

    def __init__(self, group: RankGroup, spec: FabricSpec, abort: torch.Tensor) -> None:
        """abort: int32 [1] in pinned memory; a kernel that waits stops waiting when it is not 0."""
        from leadline.engine.runner.parallel import triton_join

        self.kernels = triton_join
        self.rank, self.size, self._abort = group.rank, group.size, abort
        rows, itemsize = -(-spec.max_tokens // _HALVES), spec.dtype.itemsize
        shape = (_HALVES, len(_TURNS), self.size, rows, spec.hidden)
        flags = _HALVES * self.size * _LINE
        boxes = _HALVES * len(_TURNS) * self.size * rows * spec.hidden * itemsize
        memory, _, views = group.symmetric_memory(flags + boxes)
        memory.zero_()
        torch.cuda.synchronize(group.device)

        def flags_of(view: torch.Tensor) -> torch.Tensor:
            return view[:flags].view(torch.int64).view(_HALVES, self.size, _LINE // 8)

        def boxes_of(view: torch.Tensor) -> torch.Tensor:
            return view[flags:].view(spec.dtype).view(shape)

        self._flags, self._boxes = flags_of(memory), boxes_of(memory)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._others = [(flags_of(views[rank]), boxes_of(views[rank])) for rank in others]
        self._streams = [torch.cuda.Stream(group.device) for _ in others]
        self._numbers = torch.arange(_NUMBERS, device=group.device)
        self._count = [0] * _HALVES
        self._warps = 4 if spec.hidden <= 2048 else 8

    def start(self, which: Sum, half: int, terms: torch.Tensor) -> _Sent:
        turn = _TURNS.index(which)
        self._count[half] += 1
        number = self._count[half] % _NUMBERS
        made, left = torch.cuda.Event(), []
        made.record()
        for stream, (flags, boxes) in zip(self._streams, self._others, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(made)
                boxes[half, turn, self.rank, : len(terms)].copy_(terms)
                flags[half, self.rank, :1].copy_(self._numbers[number : number + 1])
                left.append(torch.cuda.Event())
                left[-1].record()
        return _Sent(terms, half, turn, number, left)

    def add_rms_norm(
        self, sent: Any, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows, width = residual.shape
        for event in sent.left:
            torch.cuda.current_stream().wait_event(event)
        out = torch.empty_like(residual)
        self.kernels.take_kernel[(min(rows, self.kernels.MAX_PROGRAMS),)](
            sent.terms,
            self._boxes[sent.half, sent.turn],
            self._boxes.stride(2),
            residual,
            weight,
            out,
            self._flags[sent.half],
            sent.number,
            self._abort,
            eps,
            rows,
            WIDTH=width,
            TILE=1 << (width - 1).bit_length(),
            LINE=_LINE // 8,
            NUMBERS=_NUMBERS,
            RANK=self.rank,
            SIZE=self.size,
            num_warps=self._warps,
        )
        return out
