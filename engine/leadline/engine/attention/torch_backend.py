"""Attention in plain torch operations: the reference that the other backends are held to, and the CPU path.

Decode rows are attended together. The queries of one KV head are stacked, so KV heads are never repeated:

    q  [rows, num_heads, head_dim] -> [rows, num_kv_heads, group, head_dim]   group = num_heads / num_kv_heads
    k  gathered cache rows         -> [rows, num_kv_heads, max context, head_dim]  (a view, not copied again)
    scores [rows, num_kv_heads, group, max context] + length mask

Rows of very different lengths are attended in groups, each at most half padding. Within a group, a row
shorter than the longest reads its own last token again in place of the tokens it lacks, and masks
them: what other sequences left in a block is never read, since a weight of zero does not silence a NaN.

Prefill rows are attended one by one, each with its own causal offset.

A layer with a sliding window reads the last keys of each row only. Where no context of a step is longer than
the window, it shares the work list of the layers without one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leadline.engine.attention.interface import AttentionBatch, AttentionSpec

__all__ = ["TorchBackend"]

_PADDING_WORTH_A_GROUP = 512
"""Tokens of padding in a step above which rows are grouped by length."""


class TorchBackend:
    """See `leadline.engine.attention.interface.AttentionBackend`."""

    name = "torch"
    graph_padding = None
    graph_chunks = False
    graph_fresh_chunks = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.group = spec.num_heads // spec.num_kv_heads
        self._batch: AttentionBatch | None = None
        self._work: dict[int | None, _Work] = {}
        """By the layer's window."""
        softcap = spec.softcap
        self._attend = _attend if softcap is None else functools.partial(_attend_capped, softcap)

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._work = {}
        everything: _Work | None = None
        for window in self.spec.windows:
            if window is not None and window < batch.max_context_len:
                self._work[window] = self._list_work(batch, window)
                continue
            everything = everything or self._list_work(batch, None)
            self._work[window] = everything

    def _list_work(self, batch: AttentionBatch, window: int | None) -> _Work:
        decodes = batch.num_decodes
        counts = [_seen(length, window) for length in batch.context_lens_host[:decodes]]
        groups = [self._make_group(batch, rows, window) for rows in _by_length(counts)]
        prefills: list[_PrefillRow] = []
        first = decodes
        for row in range(decodes, batch.num_rows):
            prefills.append(self._make_prefill(batch, row, first, window))
            first += batch.query_lens_host[row]
        return _Work(groups, prefills)

    def _make_prefill(self, batch: AttentionBatch, row: int, first: int, window: int | None) -> _PrefillRow:
        size, device = self.spec.block_size, batch.context_lens.device
        count, context = batch.query_lens_host[row], batch.context_lens_host[row]
        past = context - count
        begin = 0 if window is None else max(0, past + 1 - window)
        blocks = batch.block_tables[row, begin // size : -(-context // size)]
        mask = None
        hides = window is not None and window < context
        if count > 1 and (past or hides):
            # Query j sees the keys up to past + j, its window's.
            mask = torch.ones(count, context - begin, dtype=torch.bool, device=device).tril_(past - begin)
            if window is not None and hides:
                mask.triu_(past - begin + 1 - window)
        return _PrefillRow(first, count, context, begin, blocks, mask)

    def _make_group(self, batch: AttentionBatch, rows: list[int] | None, window: int | None) -> _DecodeGroup:
        """Cache rows that each context in the group reads, [rows * most]; a mask where numbers differ."""
        size, device = self.spec.block_size, batch.context_lens.device
        lengths = batch.context_lens_host[: batch.num_decodes]
        ends, tables = batch.context_lens[: len(lengths)], batch.block_tables[: len(lengths)]
        index = None
        if rows is not None:
            index = torch.tensor(rows, dtype=torch.int64, device=device)
            lengths = [lengths[row] for row in rows]
            ends, tables = ends.index_select(0, index), tables.index_select(0, index)
        counts = [_seen(length, window) for length in lengths]
        most = max(counts)
        positions, mask = torch.arange(most, device=device), None
        if window is not None:
            positions = positions + (ends[:, None] - window).clamp_(min=0)
        if min(counts) < most:
            outside = positions >= ends[:, None]
            mask = torch.zeros(outside.shape, dtype=self.spec.dtype, device=device)
            mask = mask.masked_fill_(outside, -torch.inf)[:, None, None, :]
            positions = torch.minimum(positions, ends[:, None] - 1)
        pages = positions // size
        blocks = tables.gather(1, pages) if pages.dim() == 2 else tables[:, pages]
        return _DecodeGroup(index, (blocks.long() * size + positions % size).flatten(), mask)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        batch, work = self._batch, self._work[window]
        assert batch is not None, "begin() comes before forward()"
        if k_cache.dtype != k.dtype:
            # What the cache will give back: a chunk attends to the same keys with a prefix hit and without.
            k, v = _rounded(k, k_cache.dtype), _rounded(v, v_cache.dtype)
        if not batch.kv_written:
            _write(k_cache, batch.slot_mapping, k)
            _write(v_cache, batch.slot_mapping, v)
        decodes = batch.num_decodes
        if decodes == batch.num_tokens:
            return self._decode(work, q, k_cache, v_cache)
        out = torch.empty_like(q)
        if decodes:
            out[:decodes] = self._decode(work, q[:decodes], k_cache, v_cache)
        for row in work.prefills:
            rows = slice(row.first, row.first + row.count)
            out[rows] = self._prefill(row, q[rows], k[rows], v[rows], k_cache, v_cache)
        return out

    def _decode(
        self, work: _Work, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        if work.groups[0].rows is None:
            return self._attend_group(work.groups[0], q, k_cache, v_cache)
        out = torch.empty_like(q)
        for group in work.groups:
            part = self._attend_group(group, q.index_select(0, group.rows), k_cache, v_cache)
            out.index_copy_(0, group.rows, part)
        return out

    def _attend_group(
        self, group: _DecodeGroup, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        rows, spec = q.shape[0], self.spec
        keys = _read(k_cache.flatten(0, 1), group.index, q.dtype)
        values = _read(v_cache.flatten(0, 1), group.index, q.dtype)
        shape = (rows, -1, spec.num_kv_heads, spec.head_dim)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        queries = q.reshape(rows, spec.num_kv_heads, self.group, spec.head_dim)
        out = self._attend(queries, keys, values, group.mask, False, spec.scale)
        return out.reshape(rows, spec.num_heads, spec.head_dim)

    def _prefill(
        self,
        row: _PrefillRow,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """[count, num_heads, head_dim]. A row that is the whole context reads its keys from k, v directly."""
        if row.count < row.context:
            above = row.begin % self.spec.block_size
            keys = slice(above, above + row.context - row.begin)
            k = _read(k_cache, row.blocks, q.dtype).flatten(0, 1)[keys]
            v = _read(v_cache, row.blocks, q.dtype).flatten(0, 1)[keys]
        out = self._attend(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            row.mask,
            row.mask is None and row.count > 1,
            self.spec.scale,
        )
        return out[0].transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """q [B, heads, n, dim], k and v [B, KV heads, m, dim] → like q."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] > k.shape[1]
    )


def _attend_capped(
    softcap: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """`_attend` whose scaled logits pass through softcap * tanh(x / softcap) before they are masked."""
    batch, _, count, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, count, dim)
    logits = (grouped @ k.unsqueeze(2).transpose(-1, -2) * (scale / softcap)).tanh_().mul_(softcap)
    if is_causal:
        mask = torch.ones(count, count, dtype=torch.bool, device=q.device).tril_()
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        logits = logits.add_(mask.unsqueeze(2))
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = logits.softmax(dim=-1, dtype=wide).to(q.dtype)
    return (weights @ v.unsqueeze(2)).reshape(q.shape)


def _seen(length: int, window: int | None) -> int:
    """Keys that the last token of `length` sees."""
    return length if window is None else min(length, window)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as a cache of `dtype`, an 8-bit float, holds it: what is too large saturates."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [T, heads, dim] to their slots. torch indexes no 8-bit floats: they go as bytes."""
    if cache.dtype == rows.dtype:
        cache.flatten(0, 1).index_copy_(0, slots, rows)
    else:
        as_bytes = rows.to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, as_bytes)


def _read(cache: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cache[index] in `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(0, index)
    return cache.view(torch.uint8).index_select(0, index).view(cache.dtype).to(dtype)


def _by_length(lengths: list[int]) -> list[list[int] | None]:
    """Groups of rows of which the shortest is at least half the longest; [None] is one group of all rows.

    A group costs a handful of small operations a layer, so little padding is cheaper than more groups.
    """
    if not lengths:
        return []
    if len(lengths) * max(lengths) - sum(lengths) <= _PADDING_WORTH_A_GROUP:
        return [None]
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if 2 * lengths[row] < longest or not groups:
            longest = lengths[row]
            groups.append([])
        groups[-1].append(row)
    return list(groups) if len(groups) > 1 else [None]


class _DecodeGroup:
    """Decode rows attended together: which rows (None: all), what they read, what of it does not count."""

    __slots__ = ("index", "mask", "rows")

    def __init__(self, rows: torch.Tensor | None, index: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.rows = rows
        self.index = index
        self.mask = mask


class _PrefillRow:
    """One prefill row: its queries at [first, first + count) of the batch, the keys [begin, context) that any
    of them sees, their blocks, and which query sees which (None: all that are not after it)."""

    __slots__ = ("begin", "blocks", "context", "count", "first", "mask")

    def __init__(
        self,
        first: int,
        count: int,
        context: int,
        begin: int,
        blocks: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        self.first = first
        self.count = count
        self.context = context
        self.begin = begin
        self.blocks = blocks
        self.mask = mask


@dataclass(slots=True)
class _Work:
    """What the layers of one window do in a step."""

    groups: list[_DecodeGroup]
    prefills: list[_PrefillRow]
