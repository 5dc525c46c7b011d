"""Memory that all ranks of a host can address, and the collectives of a decoder step over it.

One allocation a rank, laid out alike on all of them, through PyTorch's symmetric memory:

    | flags | o's partial sums | down's partial sums | embedding's, or x in two shots | logits | logits |

Consecutive sums of a step lie in different parts (embedding, o, down, o, down, ..., embedding), which is what
lets a part be written again without asking whether the others have read it (triton_join.py). Logits can be
gathered twice in a row (log-probabilities of a prompt), so they have two parts that take turns.

NVLink multicast is not used. Larger sums go through NCCL (`RankGroup`): docs/decisions/017 has the figures.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from leadline.engine.models.parallel import Sum, TensorParallel
from leadline.engine.runner.collectives.group import RankGroup

__all__ = ["Fabric", "FabricSpec", "make_collectives"]

logger = logging.getLogger("leadline.engine.runner")

_LARGEST_PART = 4 << 20
"""Bytes of partial sums beyond which NCCL does the sum. The variable overrides it."""
_LARGEST = "LEADLINE_TP_FABRIC_BYTES"
_PDL_ROWS = 64
_TWO_SHOTS = "LEADLINE_TP_TWO_SHOT_BYTES"


@dataclass(slots=True, frozen=True)
class FabricSpec:
    """What a model needs."""

    hidden: int
    vocab: int
    dtype: torch.dtype
    max_tokens: int
    max_rows: int
    """Rows of logits."""


def make_collectives(group: RankGroup, spec: FabricSpec) -> TensorParallel:
    """Return the collectives that a model is built with. Call once, on all ranks."""
    fabric = group.fabric = _make_fabric(group, spec)
    return TensorParallel(group.rank, group.size, group.all_reduce, group.all_gather, fabric)


def _make_fabric(group: RankGroup, spec: FabricSpec) -> Fabric | None:
    """None where ranks cannot address each other's memory, or there is no Triton; the same on all ranks."""
    if group.device.type != "cuda" or os.environ.get("LEADLINE_TP_FABRIC", "1") == "0":
        return None
    fabric: Fabric | None = None
    try:
        fabric = Fabric(group, spec)
    except Exception as error:
        logger.warning(
            "rank %d has no symmetric memory, NCCL does all collectives: %s: %s",
            group.rank,
            type(error).__name__,
            error,
        )
    # Also the barrier after which flags are known to be zero.
    return fabric if group.least(fabric is not None) else None


class Fabric:
    """`models.parallel.Fabric` over symmetric memory. Every call is made by all ranks in the same order."""

    def __init__(self, group: RankGroup, spec: FabricSpec) -> None:
        from leadline.engine.runner.collectives import triton_join

        self.kernels = triton_join
        self.rank, self.size, self.device, self.spec = group.rank, group.size, group.device, spec
        itemsize = spec.dtype.itemsize
        largest = int(os.environ.get(_LARGEST) or _LARGEST_PART)
        self.max_tokens = min(spec.max_tokens, largest // (spec.hidden * itemsize))
        self.columns = -(-spec.vocab // group.size)
        sizes = {
            "flags": triton_join.MAX_PROGRAMS * group.size * 8,
            **{which.name: self.max_tokens * spec.hidden * itemsize for which in Sum},
            **{f"logits {turn}": spec.max_rows * self.columns * itemsize for turn in range(2)},
        }
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name], total = total, total + -(-size // 256) * 256
        self._memory, addresses = group.symmetric_memory(total)
        self._memory.zero_()
        torch.cuda.synchronize(self.device)

        def table(name: str) -> torch.Tensor:
            return torch.tensor([base + offsets[name] for base in addresses], device=self.device)

        def part(name: str, *shape: int) -> torch.Tensor:
            first = offsets[name]
            return self._memory[first : first + sizes[name]].view(spec.dtype).view(*shape)

        self._flags = table("flags")
        self._parts = {which: part(which.name, self.max_tokens, spec.hidden) for which in Sum}
        self._tables = {which: table(which.name) for which in Sum}
        self._logits = [part(f"logits {turn}", spec.max_rows, self.columns) for turn in range(2)]
        self._logits_tables = [table(f"logits {turn}") for turn in range(2)]
        self._turn = 0
        self._epochs = torch.zeros(triton_join.MAX_PROGRAMS, dtype=torch.int64, device=self.device)
        self.aborting = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Not 0: kernels that wait for another rank stop waiting."""
        self._warps = 4 if spec.hidden <= 2048 else 8
        default = 1 << 62 if group.size == 2 else 256 << 10
        self.two_shots_from = int(os.environ.get(_TWO_SHOTS) or default)
        """Bytes of partial sums."""

    def abort(self) -> None:
        """From any thread: kernels that wait for another rank stop waiting. Final."""
        self.aborting.fill_(1)

    def partial(self, which: Sum, rows: int) -> torch.Tensor | None:
        return self._parts[which][:rows] if rows <= self.max_tokens else None

    def sum(self, which: Sum, rows: int) -> torch.Tensor:
        out = self._parts[which].new_empty((rows, self.spec.hidden))
        self._join(which, rows, out, out, out, 0.0, add=False, norm=False)
        return out

    def add(self, which: Sum, residual: torch.Tensor) -> None:
        self._join(which, len(residual), residual, residual, residual, 0.0, add=True, norm=False)

    def add_rms_norm(
        self,
        which: Sum,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        rows, two = len(residual), residual.nbytes >= self.two_shots_from
        out = self._parts[Sum.EMBEDDING][:rows] if two else torch.empty_like(residual)
        self._join(which, rows, residual, weight, out, eps, add=True, norm=True, two=two)
        return out

    def _join(
        self,
        which: Sum,
        rows: int,
        residual: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        *,
        add: bool,
        norm: bool,
        two: bool = False,
    ) -> None:
        if not rows:
            return
        width = self.spec.hidden
        programs = min(-(-rows // self.size) if two else rows, self.kernels.MAX_PROGRAMS)
        pdl: dict[str, Any] = {"launch_pdl": True} if rows <= _PDL_ROWS else {}
        self.kernels.join_kernel[(programs,)](
            self._tables[which],
            self._tables[Sum.EMBEDDING],
            residual,
            weight,
            out,
            self._flags,
            self._epochs,
            self.aborting,
            eps,
            rows,
            WIDTH=width,
            TILE=1 << (width - 1).bit_length(),
            RANK=self.rank,
            SIZE=self.size,
            ADD=add,
            NORM=norm,
            TWO=two,
            PDL=bool(pdl),
            num_warps=self._warps,
            **pdl,
        )

    def logits_part(self, rows: int) -> torch.Tensor | None:
        part = self._logits[self._turn]
        return part[:rows] if rows <= len(part) else None

    def gather_logits(self, rows: int, out: torch.Tensor | None) -> torch.Tensor:
        table = self._logits_tables[self._turn]
        if out is None:
            out = self._logits[0].new_empty((rows, self.spec.vocab))
        tile = 2048
        tiles = rows * -(-self.columns // tile)
        if rows:
            self.kernels.gather_kernel[(min(tiles, self.kernels.MAX_PROGRAMS),)](
                table,
                out,
                self._flags,
                self._epochs,
                self.aborting,
                rows,
                COLUMNS=self.columns,
                WIDTH=self.spec.vocab,
                STRIDE=out.stride(0),
                TILE=tile,
                RANK=self.rank,
                SIZE=self.size,
                num_warps=8,
            )
        self._turn = 1 - self._turn
        return out
