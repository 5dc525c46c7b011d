"""Attention within each of several packed inputs, without a KV cache.

    q, k, v   [T, heads, head_dim]     T tokens of all inputs, one input behind the other
    group     inputs of similar length, padded at their end to the longest: [inputs, heads, length, head_dim]

Linear layers run on packed tokens; only attention sees padding. With a causal mask no token sees the padding
behind it. Without one, a mask hides it where the inputs of a group differ in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["PackedAttention"]

_WORTH_A_GROUP = 256
"""Tokens of padding above which inputs are split into groups by length."""


@dataclass(slots=True)
class _Group:
    count: int
    longest: int
    rows: torch.Tensor | None
    """int64 [count * longest]: the packed row of each place; of padding, the input's last. None: the packed
    rows as they are."""
    places: torch.Tensor | None
    """int64: places that are no padding, in the order of `rows`. None: all."""
    mask: torch.Tensor | None
    """bool [count, 1, 1, longest]: true for keys that are no padding."""


class PackedAttention:
    """An AttentionFn (models/base.py) for one step."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, *, causal: bool, scale: float | None = None
    ) -> None:
        self._causal, self._scale = causal, scale
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._groups = [
            _group(inputs, lengths, starts, device, mask=not causal) for inputs in _by_length(lengths)
        ]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = self._groups[0]
        if first.rows is None:
            return self._attend(first, q, k, v)
        out = torch.empty_like(q)
        for group in self._groups:
            rows = group.rows
            assert rows is not None
            attended = self._attend(group, *(x.index_select(0, rows) for x in (q, k, v)))
            if group.places is not None:
                rows, attended = rows.index_select(0, group.places), attended.index_select(0, group.places)
            out.index_copy_(0, rows, attended)
        return out

    def _attend(self, group: _Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v [count * longest, heads, head_dim] → the same shape as q."""
        q, k, v = (x.view(group.count, group.longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=group.mask,
            is_causal=self._causal and group.longest > 1,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of inputs in which the shortest is at least half as long as the longest; one group where padding
    all of them costs little."""
    everyone = list(range(len(lengths)))
    if len(lengths) * max(lengths) - sum(lengths) <= _WORTH_A_GROUP:
        return [everyone]
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(everyone, key=lambda index: -lengths[index]):
        if not groups or 2 * lengths[index] < longest:
            longest = lengths[index]
            groups.append([])
        groups[-1].append(index)
    return groups


def _group(
    inputs: list[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device, *, mask: bool
) -> _Group:
    longest = max(lengths[index] for index in inputs)
    even = all(lengths[index] == longest for index in inputs)
    if even and len(inputs) == len(lengths):
        return _Group(len(inputs), longest, None, None, None)
    sizes = torch.tensor([lengths[index] for index in inputs])
    begins = torch.tensor([starts[index] for index in inputs])
    places = torch.arange(longest)
    inside = places < sizes[:, None]
    rows = (begins[:, None] + torch.minimum(places, sizes[:, None] - 1)).flatten().to(device)
    if even:
        return _Group(len(inputs), longest, rows, None, None)
    real = inside.flatten().nonzero().flatten().to(device)
    hidden = inside[:, None, None, :].to(device) if mask else None
    return _Group(len(inputs), longest, rows, real, hidden)
