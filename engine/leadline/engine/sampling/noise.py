"""Counter-based noise: the number drawn for vocabulary entry v at position p of a sequence with seed s is a
pure function of (s, p, v).

Nothing is carried from step to step, so a sequence that is preempted, resumed on another pod, or batched
with others draws the same numbers. The integers come from int32 and int64 arithmetic that wraps modulo
2**32 and 2**64, which torch computes alike on every device; `uniform` is therefore equal bit for bit on CPU
and GPU. `gumbel` takes two logarithms of it, whose last bit may differ between devices, as the last bits of
the logits do.

    (seed, position) --splitmix64 finaliser--> 64-bit row key = (k0, k1)
    entry v --> v * odd constant + k0 --mix32--> + k1 --mix32--> 32 random bits

`mix32` is the two-multiply xorshift permutation known as "lowbias32"; keying it twice keeps rows with
related keys apart. The tests hold the bits to a chi-square test, to independence of neighbours, and to
pinned values.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "random_bits", "row_keys", "uniform"]

_GOLDEN64 = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX64_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX64_B = -7723592293110705685  # 0x94D049BB133111EB
_GOLDEN32 = -1640531535  # 0x9E3779B1 as int32
_MIX32_A = 0x7FEB352D
_MIX32_B = -2073254261  # 0x846CA68B
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _shift64(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift64(x, 30)) * _MIX64_A
    x = (x ^ _shift64(x, 27)) * _MIX64_B
    return x ^ _shift64(x, 31)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [R] seeds and positions (of the token to draw) → int64 [R] keys."""
    return _mix64(_mix64(seeds + _GOLDEN64) + positions * _GOLDEN64)


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX32_A
    x ^= (x >> 15) & 0x1FFFF
    x *= _MIX32_B
    x ^= (x >> 16) & 0xFFFF
    return x


def random_bits(keys: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """int64 [R] keys, int32 [V] (or [R, V]) entries → int32 [R, V], uniform over all 2**32 patterns."""
    low = ((keys << 32) >> 32).to(torch.int32)[:, None]
    high = (keys >> 32).to(torch.int32)[:, None]
    x = entries * _GOLDEN32 + low
    _mix32_(x)
    x += high
    return _mix32_(x)


def uniform(keys: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """float32 [R, V] in (0, 1).

    The low 31 bits y become (y + 0.5) * 2**-31, rounded to nearest: float32 then resolves small values to a
    part in 2**24, so the tail that decides a Gumbel draw over a large vocabulary is not coarse. Values that
    would round to 1 are held at the largest float32 below it.
    """
    bits = random_bits(keys, entries) & 0x7FFFFFFF
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel(keys: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [R, V]: -log(E) with E = -log(1 - u) exponential.

    argmax(logits + gumbel) is a draw from softmax(logits) (Gumbel 1954; Maddison, Tarlow and Minka 2014).
    """
    return uniform(keys, entries).neg_().log1p_().neg_().log_().neg_()
