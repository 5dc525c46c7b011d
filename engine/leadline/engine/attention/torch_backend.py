"""Attention in plain torch operations: the reference that the other backends are held to, and the CPU path.

Decode rows are attended together. The queries of one KV head are stacked, so KV heads are never repeated:

    q  [rows, num_heads, head_dim] -> [rows, num_kv_heads, group, head_dim]   group = num_heads / num_kv_heads
    k  gathered cache rows         -> [rows, num_kv_heads, max context, head_dim]  (a view, not copied again)
    scores [rows, num_kv_heads, group, max context] + length mask

Rows of very different lengths are attended in groups, each at most half padding. Within a group, a row
shorter than the longest reads its own last token again in place of the tokens it lacks, and masks
them: what other sequences left in a block is never read, since a weight of zero does not silence a NaN.

Prefill rows are attended one by one, each with its own causal offset.
"""

from __future__ import annotations

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
        self._groups: list[_DecodeGroup] = []
        self._prefills: list[_PrefillRow] = []

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        decodes = batch.num_decodes
        self._groups = [
            self._make_group(batch, rows) for rows in _by_length(batch.context_lens_host[:decodes])
        ]
        self._prefills = []
        first = decodes
        for row in range(decodes, batch.num_rows):
            count, context = batch.query_lens_host[row], batch.context_lens_host[row]
            blocks = -(-context // self.spec.block_size)
            mask = None
            if 1 < count < context:
                # Query j sees context - count + j + 1 keys.
                mask = torch.ones(count, context, dtype=torch.bool, device=batch.context_lens.device)
                mask = mask.tril_(context - count)
            self._prefills.append(_PrefillRow(first, count, context, batch.block_tables[row, :blocks], mask))
            first += count

    def _make_group(self, batch: AttentionBatch, rows: list[int] | None) -> _DecodeGroup:
        """Cache rows of every context in the group, [rows * longest context]; a mask where lengths differ."""
        size, device = self.spec.block_size, batch.context_lens.device
        lengths = batch.context_lens_host[: batch.num_decodes]
        ends, tables = batch.context_lens[: len(lengths)], batch.block_tables[: len(lengths)]
        index = None
        if rows is not None:
            index = torch.tensor(rows, dtype=torch.int64, device=device)
            lengths = [lengths[row] for row in rows]
            ends, tables = ends.index_select(0, index), tables.index_select(0, index)
        longest = max(lengths)
        positions, mask = torch.arange(longest, device=device), None
        if min(lengths) < longest:
            outside = positions >= ends[:, None]
            mask = torch.zeros(outside.shape, dtype=self.spec.dtype, device=device)
            mask = mask.masked_fill_(outside, -torch.inf)[:, None, None, :]
            positions = torch.minimum(positions, ends[:, None] - 1)
            blocks = tables.gather(1, positions // size)
        else:
            blocks = tables[:, positions // size]
        return _DecodeGroup(index, (blocks.long() * size + positions % size).flatten(), mask)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "begin() comes before forward()"
        if k_cache.dtype != k.dtype:
            # What the cache will give back: a chunk attends to the same keys with a prefix hit and without.
            k, v = _rounded(k, k_cache.dtype), _rounded(v, v_cache.dtype)
        if not batch.kv_written:
            _write(k_cache, batch.slot_mapping, k)
            _write(v_cache, batch.slot_mapping, v)
        decodes = batch.num_decodes
        if decodes == batch.num_tokens:
            return self._decode(q, k_cache, v_cache)
        out = torch.empty_like(q)
        if decodes:
            out[:decodes] = self._decode(q[:decodes], k_cache, v_cache)
        for row in self._prefills:
            rows = slice(row.first, row.first + row.count)
            out[rows] = self._prefill(row, q[rows], k[rows], v[rows], k_cache, v_cache)
        return out

    def _decode(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        if self._groups[0].rows is None:
            return self._attend_group(self._groups[0], q, k_cache, v_cache)
        out = torch.empty_like(q)
        for group in self._groups:
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
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=spec.scale)
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
            k = _read(k_cache, row.blocks, q.dtype).flatten(0, 1)[: row.context]
            v = _read(v_cache, row.blocks, q.dtype).flatten(0, 1)[: row.context]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=row.mask,
            is_causal=row.count == row.context and row.count > 1,
            scale=self.spec.scale,
            enable_gqa=self.group > 1,
        )
        return out[0].transpose(0, 1)


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
    """One prefill row: its queries at [first, first + count) of the batch, its context, blocks and causal
    mask."""

    __slots__ = ("blocks", "context", "count", "first", "mask")

    def __init__(
        self, first: int, count: int, context: int, blocks: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        self.first = first
        self.count = count
        self.context = context
        self.blocks = blocks
        self.mask = mask
