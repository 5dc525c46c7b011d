"""Rotary position embedding: cos and sin tables for every type that models use.

Tables are float32 [max_positions, head_dim]; the second half of a row repeats the first, with the sign of
the rotation folded into sin, so that applying them to a head x = [x1 | x2] takes one swap of halves:

    out = x * cos + [x2 | x1] * sin        cos = [c | c]   sin = [-s | s]

Where pairs are neighbours, or only the first numbers of a head rotate, the rows of the projections that make
queries and keys are put into this order when the weights are loaded (`pair_order`): attention sees the same
sums, and no kernel sees a difference. Numbers that do not rotate have a cos of 1 and a sin of 0.

Sources: RoFormer (arXiv 2104.09864); linear and NTK ("dynamic") scaling as Hugging Face defines them; YaRN
(arXiv 2309.00071); LongRoPE (arXiv 2402.13753); llama3 as in Meta's Llama 3.1 reference. `dynamic` equals
`default` up to max_position_embeddings, and ModelConfig.max_model_len ends there (see its docstring).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from leadline.engine.errors import ConfigError
from leadline.engine.models.config import RopeConfig

__all__ = ["inverse_frequencies", "pair_order", "query_factors", "rope_tables"]


def rope_tables(
    rope: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each float32 [max_positions, head_dim]; scaled by the attention factor if there is
    one. None: of a layer that does not rotate, ones and zeros.

    Computed on the CPU, then moved: every device and rank gets the same numbers.
    """
    if max_positions < 1:
        raise ConfigError(f"max_positions must be at least 1, not {max_positions}")
    if rope is None:
        shape = (max_positions, head_dim)
        return torch.ones(shape, device=device), torch.zeros(shape, device=device)
    long = max_positions > rope.original_max_position_embeddings
    frequencies, scale = inverse_frequencies(rope, rope.rotary_dim or head_dim, long=long)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
    still = head_dim // 2 - len(frequencies)
    if still:
        cos, sin = F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def pair_order(rope: RopeConfig | None, head_dim: int) -> list[int] | None:
    """Where the numbers of a head in this module's order come from in the model's; None: they are equal."""
    if rope is None or (rope.rotary_dim is None and not rope.interleaved):
        return None
    rotary = rope.rotary_dim or head_dim
    still = list(range(rotary, head_dim))
    if rope.interleaved:
        first, second = list(range(0, rotary, 2)), list(range(1, rotary, 2))
    else:
        first, second = list(range(rotary // 2)), list(range(rotary // 2, rotary))
    return [*first, *still[: len(still) // 2], *second, *still[len(still) // 2 :]]


def query_factors(rope: RopeConfig | None, max_positions: int, device: torch.device) -> torch.Tensor | None:
    """What queries of each position are multiplied by, float32 [max_positions]; None: all by 1."""
    if rope is None or not rope.query_growth or max_positions <= rope.original_max_position_embeddings:
        return None
    lengths = torch.arange(max_positions, dtype=torch.float32) / rope.original_max_position_embeddings
    return (1 + rope.query_growth * torch.log(1 + lengths.floor())).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, long: bool = False) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, float32 [head_dim / 2], and the factor on cos and sin. head_dim: of
    the numbers that rotate. long: sequences may be longer than the original length (longrope)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.rope_type in ("default", "dynamic"):
        return base, 1.0
    if rope.rope_type == "linear":
        return base / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, base), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)
    if rope.rope_type == "longrope":
        divisors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
        return 1.0 / (divisors * rope.theta**exponents), _longrope_attention_factor(rope)
    raise ConfigError(f"unknown rope_type {rope.rope_type!r}")


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between.

    rotations over the original length:   < low_freq_factor   ...   > high_freq_factor
    frequency:                              base / factor    blend        base
    """
    rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((rotations - rope.low_freq_factor) / span).clamp_(0.0, 1.0)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs that turn over beta_fast times in the original length stay, those below beta_slow are divided."""

    def pair_with(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    divide = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp_(0.0, 1.0)
    return base / rope.factor * divide + base * (1 - divide)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
