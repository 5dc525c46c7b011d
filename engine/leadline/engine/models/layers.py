"""The decoder's layers with weights: linears, merged and split over ranks, embedding and head split by
vocabulary.

A layer owns this rank's part of its weights, allocated at once in the final dtype and place, and tells the
loader through `slots()` which checkpoint tensor (or slice of one) each part is filled from. Layers are plain
objects: no autograd, no nn.Module.

A linear keeps its weight in one of four forms: plain, in FP8 with a scale a row, rounded as FP8 rounds (the
reference on a CPU), or in groups of columns (grouped.py). `Linear.keep` sets it before the weights are read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leadline.engine.models.fp8 import FP8, round_rows, scaled_product
from leadline.engine.models.grouped import GroupedPart, GroupedWeight
from leadline.engine.models.parallel import Part, Sum, TensorParallel
from leadline.engine.models.quantized_config import StoredAs
from leadline.engine.models.targets import FP8Rows, RoundedRows, Target

__all__ = [
    "ColumnLinear",
    "Form",
    "Linear",
    "Norm",
    "Place",
    "RowLinear",
    "Slot",
    "Slots",
    "VocabEmbedding",
    "VocabHead",
    "WholeNorm",
    "can_pack",
]


@dataclass(slots=True)
class Slot:
    """Where a checkpoint tensor of `shape` goes: target = tensor.narrow(dim, start, target.shape[dim])."""

    target: torch.Tensor | Target
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


Slots = Iterator[tuple[str, Slot]]


@dataclass(slots=True, frozen=True)
class Place:
    """Where and how weights are allocated."""

    dtype: torch.dtype
    device: torch.device
    matrices_later: bool = False
    """Weights of linears and experts stay on the meta device until `keep` allocates them."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int, padded: bool) -> torch.Tensor:
        """Return a weight [..., rows, columns]; `padded`: some of it is never filled and must be zero."""
        device = torch.device("meta") if self.matrices_later else self.device
        return (torch.zeros if padded else torch.empty)(*shape, dtype=self.dtype, device=device)


class Form(enum.Enum):
    """How a linear keeps its weight."""

    PLAIN = "plain"
    FP8 = "fp8"
    ROUNDED = "rounded"


class Norm:
    """The weight of an RMSNorm, whole on every rank, or a rank's part of it."""

    def __init__(self, size: int | Part, place: Place, *, offset: bool = False) -> None:
        """offset: the norm multiplies by 1 + what the checkpoint has. Such weights are kept in float32: in 16
        bits the sum would lose most of their digits."""
        self.part = size if isinstance(size, Part) else Part(size, 0, size, size)
        self.offset = offset
        dtype = torch.promote_types(place.dtype, torch.float32) if offset else place.dtype
        self.weight = Place(dtype, place.device).zeros(self.part.count)

    def slots(self, prefix: str) -> Slots:
        part = self.part
        yield f"{prefix}.weight", Slot(self.weight[: part.filled], (part.total,), 0, part.start)

    def settle(self) -> None:
        """Call once after loading."""
        if self.offset:
            self.weight.add_(1.0)


class WholeNorm:
    """RMSNorms over all query heads of a token and over all its key heads, of all ranks."""

    def __init__(
        self,
        q_norm: Norm,
        k_norm: Norm,
        heads: Part,
        kv_heads: Part,
        dim: int,
        tp: TensorParallel,
        eps: float,
    ) -> None:
        self.q_norm, self.k_norm, self.tp, self.eps = q_norm, k_norm, tp, eps
        self.widths = [heads.count * dim, kv_heads.count * dim]
        # Where there are more ranks than KV heads, several ranks have the same one.
        copies = max(1, tp.size // kv_heads.total) if tp.size % kv_heads.total == 0 else 1
        totals = [heads.total * dim, kv_heads.total * dim * copies]
        self.totals = torch.tensor(totals, dtype=torch.float32, device=q_norm.weight.device)

    def __call__(self, qkv: torch.Tensor) -> None:
        """qkv [T, q | k | v], q and k overwritten."""
        parts = qkv[:, : sum(self.widths)].split(self.widths, dim=1)
        wide = [part.to(self.totals.dtype) for part in parts]
        squares = torch.stack([part.square().sum(dim=1) for part in wide], dim=1)
        inverse = torch.rsqrt(self.tp.all_reduce(squares) / self.totals + self.eps)
        for index, norm in enumerate((self.q_norm, self.k_norm)):
            parts[index].copy_(wide[index] * inverse[:, index, None] * norm.weight)


class Linear:
    """y = x Wᵀ + b for x [T, in], W [out, in] as checkpoints have it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        """float32 [out, 1] of a weight in FP8"""
        self.grouped: GroupedWeight | None = None
        """The weight in groups; `weight` is empty then."""
        self.rounds_input = False
        """Reference of FP8: the weight is rounded already."""
        self.in_features, self.dtype = weight.shape[1], weight.dtype

    @property
    def is_plain(self) -> bool:
        """The weight is in the model's floats, and so is the product."""
        return self.scale is None and self.grouped is None and not self.rounds_input and self.packed is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.grouped is not None:
            return self.grouped(x, self.bias)
        if self.scale is not None:
            return scaled_product(x, self.weight, self.scale, self.bias)
        if self.rounds_input:
            x = round_rows(x)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same, written to `out`."""
        if not self.is_plain:
            return out.copy_(Linear.__call__(self, x))
        if self.bias is not None:
            return torch.addmm(self.bias, x, self.weight.t(), out=out)
        return torch.mm(x, self.weight.t(), out=out)

    def keep(self, form: Form | StoredAs, device: torch.device) -> None:
        """Allocate a weight that was left for later. `form`: StoredAs for groups of columns as in the file.
        Padding is zero."""
        shape, dtype = self.weight.shape, self.weight.dtype
        if isinstance(form, StoredAs):
            self.grouped = GroupedWeight(shape[0], shape[1], form, dtype, device)
            self.weight = torch.empty((0, shape[1]), dtype=dtype, device=device)
            return
        kind = FP8 if form is Form.FP8 else dtype
        self.weight = torch.zeros(shape, dtype=kind, device=device)
        self.rounds_input = form is Form.ROUNDED
        if form is Form.FP8:
            self.scale = torch.zeros((shape[0], 1), dtype=torch.float32, device=device)

    def part(self, rows: slice, columns: int) -> torch.Tensor | Target:
        """Return where the loader puts these rows and the first `columns` columns of the weight."""
        if self.grouped is not None:
            return GroupedPart(self.grouped, rows, columns)
        values = self.weight[rows, :columns]
        if self.scale is not None:
            return FP8Rows(values, self.scale[rows], self.dtype)
        return RoundedRows(values) if self.rounds_input else values

    def multiply_rows(self, factors: torch.Tensor) -> None:
        """Multiply the weight's rows by powers of two, float32 [out]: exactly, in every form."""
        if self.grouped is not None:
            self.grouped.multiply_scales(factors)
        else:
            (self.weight if self.scale is None else self.scale).mul_(factors[:, None])

    def finalize(self) -> None:
        """Call once after loading. On CPU in float32, exchange the weight for oneDNN's blocked layout.

        Measured on 2 cores for SmolLM2's shapes: 2 to 4 times F.linear at 1 row, 3 to 5 times at 8 rows,
        since MKL reads row-major weights well below memory bandwidth there. The hint of 8 rows picks a
        layout that is as good as any at every number of rows from 1 to 2048 (a hint of 1 is up to twice as
        slow at 8).
        """
        if self.grouped is None and can_pack(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 8)
            self.weight = self.weight.new_empty(0)


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class ColumnLinear(Linear):
    """Several projections of one input merged by rows, each split over ranks by its own output rows.

    checkpoint   q_proj | rank 0 | rank 1 |    k_proj | 0 | 1 |    v_proj | 0 | 1 |
    rank 1 here  | q: rank 1's rows | k: 1 | v: 1 |
    """

    def __init__(
        self,
        parts: list[tuple[str, Part]],
        in_features: int,
        place: Place,
        *,
        bias: bool,
        merged: str | None = None,
    ) -> None:
        """`parts`: name in the checkpoint, and this rank's rows of it. merged: the checkpoint has them in one
        tensor of this name, one below the other."""
        rows = sum(part.count for _, part in parts)
        padded = any(part.filled < part.count for _, part in parts)
        make = place.zeros if padded else place.empty
        super().__init__(place.matrix(rows, in_features, padded=padded), make(rows) if bias else None)
        self.parts, self.merged = parts, merged
        self.out_features = rows

    def modules(self, prefix: str) -> list[str]:
        """Return the checkpoint's modules that the weight is made of."""
        if self.merged is not None:
            return [f"{prefix}.{self.merged}"]
        return [f"{prefix}.{name}" for name, _ in self.parts]

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Call after loading and before `finalize`: row i becomes what row order[i] was, in every form."""
        tensors = [self.weight, self.scale, self.bias]
        if (grouped := self.grouped) is not None:
            tensors = [grouped.values, grouped.scales, grouped.zeros, grouped.row_scale, self.bias]
        for tensor in tensors:
            if tensor is not None:
                # torch indexes no 8-bit floats: they go as bytes.
                rows = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                rows.copy_(rows.index_select(0, order))

    def slots(self, prefix: str) -> Slots:
        row, above, total = 0, 0, sum(part.total for _, part in self.parts)
        for name, part in self.parts:
            rows, start = slice(row, row + part.filled), part.start
            whole, height = f"{prefix}.{name}", part.total
            if self.merged is not None:
                whole, height, start = f"{prefix}.{self.merged}", total, above + start
            target = self.part(rows, self.in_features)
            yield f"{whole}.weight", Slot(target, (height, self.in_features), 0, start)
            if self.bias is not None:
                yield f"{whole}.bias", Slot(self.bias[rows], (height,), 0, start)
            row += part.count
            above += part.total


class RowLinear(Linear):
    """A projection split by input columns: ranks hold partial sums, added up by the group's all-reduce."""

    def __init__(
        self, out_features: int, part: Part, place: Place, tp: TensorParallel, which: Sum, *, bias: bool
    ) -> None:
        """`part`: this rank's columns."""
        weight = place.matrix(out_features, part.count, padded=part.filled < part.count)
        super().__init__(weight, place.empty(out_features) if bias else None)
        self.columns = part
        self.shape = (out_features, part.total)
        self.tp = tp
        self.which = which

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(super().__call__(x))

    def adds(self, x: torch.Tensor) -> bool:
        """The product with x can add to a residual by itself, `residual.addmm_(x, weight.t())`: one rounding
        and one pass over it less."""
        return x.is_cuda and self.tp.size == 1 and self.bias is None and self.is_plain

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum, where the fabric wants it if there is one (and it has room)."""
        out = None if self.tp.fabric is None else self.tp.fabric.partial(self.which, x.shape[0])
        return super().__call__(x) if out is None else self.into(x, out)

    def modules(self, prefix: str) -> list[str]:
        """Return the checkpoint's module that the weight comes from."""
        return [prefix]

    def slots(self, prefix: str) -> Slots:
        target = self.part(slice(0, self.shape[0]), self.columns.filled)
        yield f"{prefix}.weight", Slot(target, self.shape, 1, self.columns.start)
        if self.bias is not None:
            yield f"{prefix}.bias", Slot(self.bias, (self.shape[0],))

    def finalize(self) -> None:
        if self.bias is not None and self.tp.rank > 0:
            self.bias = None  # the sum over ranks must hold it once
        super().finalize()


class _VocabRows:
    """This rank's rows of a [vocab, hidden] matrix, padded with zeros so that every rank has as many."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Place, tp: TensorParallel) -> None:
        rows = -(-vocab_size // tp.size)
        self.tp = tp
        self.shape = (vocab_size, hidden_size)
        self.first = min(tp.rank * rows, vocab_size)
        self.count = min(rows, vocab_size - self.first)
        self.weight = place.empty(rows, hidden_size)
        self.weight[self.count :].zero_()

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}.weight", Slot(self.weight[: self.count], self.shape, 0, self.first)


class VocabEmbedding(_VocabRows):
    """Token ids [T] → [T, hidden]. A rank looks up the ids it owns; other rows are zero before the sum."""

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first
        foreign = (local < 0) | (local >= self.count)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill_(foreign.unsqueeze(-1), 0)
        fabric = self.tp.fabric
        if fabric is None or (terms := fabric.partial(Sum.EMBEDDING, len(rows))) is None:
            return self.tp.all_reduce(rows)
        terms.copy_(rows)
        return fabric.sum(Sum.EMBEDDING, len(rows))


class VocabHead:
    """Hidden states [R, hidden] → logits [R, vocab], gathered over ranks. Tied: the embedding's rows."""

    def __init__(
        self, vocab_size: int, hidden_size: int, place: Place, tp: TensorParallel, tied: VocabEmbedding | None
    ) -> None:
        self.rows = tied or _VocabRows(vocab_size, hidden_size, place, tp)
        self.tied = tied is not None
        self.vocab_size = vocab_size
        self.tp = tp
        self.linear = Linear(self.rows.weight)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None and self.tp.size == 1 and self.linear.packed is None:
            return torch.mm(hidden, self.linear.weight.t(), out=out)
        fabric = self.tp.fabric
        if fabric is not None and (part := fabric.logits_part(len(hidden))) is not None:
            self.linear.into(hidden, part)
            return fabric.gather_logits(len(hidden), out)
        logits = self.tp.all_gather(self.linear(hidden))
        if logits.shape[-1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        return logits if out is None else out.copy_(logits)

    def slots(self, prefix: str) -> Slots:
        return iter(()) if self.tied else self.rows.slots(prefix)

    def finalize(self) -> None:
        """A tied embedding keeps its own rows for look-ups; an untied matrix is packed and let go."""
        self.linear.finalize()
        if not self.tied:
            self.rows.weight = self.linear.weight
