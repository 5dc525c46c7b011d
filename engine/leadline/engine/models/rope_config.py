"""Rotary settings out of config.json, in either spelling.

transformers 5 writes `rope_parameters` with rope_theta inside, older versions `rope_scaling` beside it.
Owns the refusal, by field name, of what models/rope.py does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import LARGEST, positive, positive_number

__all__ = ["ROPE_FIELDS", "RopeConfig", "RopeRule", "read_rope"]

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
"""Supported rope types, and the fields each cannot do without."""

_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
    "rope_theta",
    "original_max_position_embeddings",
)
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
_FACTORS = ("short_factor", "long_factor")
ROPE_FIELDS = frozenset(
    {*_NUMBERS, *_FACTORS, "rope_type", "type", "truncate", "mrope_section", "max_position_embeddings"}
)
"""Fields that are read; mrope_section sets apart axes of images, and a text's positions are equal on all.
max_position_embeddings repeats the field outside."""


@dataclass(slots=True, frozen=True)
class RopeRule:
    """What a family's rotation is beyond that of Llama."""

    types: frozenset[str] = frozenset(_NEEDED)
    """Those that its reference implementation computes."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Names that it has for them."""
    partial: float | None = None
    """The default of partial_rotary_factor; None: it is refused."""
    dim_field: str | None = None
    """The field with the numbers of a head that rotate, where partial_rotary_factor is absent."""
    interleaved: bool = False
    """Pairs are neighbours, not halves of a head apart."""
    scales_queries: bool = False
    """llama_4_scaling_beta lets queries grow with their position."""


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Rotary embedding. Fields that a type does not use keep their defaults."""

    rope_type: str
    """default | linear | dynamic | llama3 | yarn | longrope"""
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Length the model was pretrained at (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """yarn, longrope: cos and sin are multiplied by it; None: derived from factor (and mscale,
    mscale_all_dim)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of each pair's frequency, in contexts up to the original length."""
    long_factor: tuple[float, ...] = ()
    """The same in longer ones."""
    rotary_dim: int | None = None
    """Numbers of a head that rotate, the first ones; None: all."""
    interleaved: bool = False
    """Pairs are neighbours, not halves of these numbers apart."""
    query_growth: float = 0.0
    """Queries are multiplied by 1 + query_growth * log(1 + position // original_max_position_embeddings)."""


def read_rope(
    fields: Mapping[str, Any],
    head_dim: int = 0,
    rule: RopeRule = RopeRule(),
) -> RopeConfig:
    """`fields` are config.json's, without nulls. Where both spellings are there, rope_scaling counts, as in
    transformers, unless it is empty. Raises UnsupportedModel naming the field."""
    name = (
        "rope_scaling" if fields.get("rope_scaling") or "rope_parameters" not in fields else "rope_parameters"
    )
    rope = fields.get(name, {})
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"config.json: {name} must be an object, not {rope!r}")
    if rope and all(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(f"config.json: {name} differs by layer type ({', '.join(rope)})")
    given = {key: value for key, value in rope.items() if value is not None}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if isinstance(rope_type, str):
        rope_type = rule.other_names.get(rope_type, rope_type)
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise UnsupportedModel(
            f"config.json: {name} has rope_type {rope_type!r}; supported are {', '.join(_NEEDED)}"
        )
    if rope_type not in rule.types:
        raise UnsupportedModel(
            f"config.json: rope_type {rope_type!r} is not supported for this architecture; "
            f"{' and '.join(sorted(rule.types))} are"
        )
    given.setdefault("rope_theta", fields.get("rope_theta", 10_000.0))
    if "partial_rotary_factor" in fields:
        given.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    if rule.dim_field in fields:
        given.setdefault("partial_rotary_factor", positive(fields, rule.dim_field) / head_dim)
    whole = positive(fields, "max_position_embeddings")
    # The outer field, where present, overrides the inner one; the whole length stands in for both.
    if "original_max_position_embeddings" in fields and rope_type != "default":
        given["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    given.setdefault("original_max_position_embeddings", whole)
    for key in _NEEDED[rope_type]:
        if key not in given:
            raise UnsupportedModel(f"config.json: {name} of rope_type {rope_type!r} lacks {key}")
    numbers = {key: _number(given[key], f"{name}.{key}") for key in _NUMBERS if key in given}
    rotary_dim = _rotary_dim(given, head_dim, rule)
    original = numbers["original_max_position_embeddings"]
    if rope_type in ("yarn", "longrope"):
        numbers.setdefault("factor", whole / original)
    _check_together(rope_type, numbers, name)
    optional = {key: numbers[key] for key in _NUMBERS[:8] if key in numbers}
    pairs = (rotary_dim or head_dim) // 2
    factors = {
        key: _factors(given[key], f"{name}.{key}", pairs) for key in _NEEDED[rope_type] if key in _FACTORS
    }
    return RopeConfig(
        rope_type=rope_type,
        theta=numbers["rope_theta"],
        original_max_position_embeddings=int(original),
        truncate=bool(given.get("truncate", True)),
        rotary_dim=rotary_dim,
        interleaved=rule.interleaved,
        query_growth=numbers.get("llama_4_scaling_beta", 0.0) if rule.scales_queries else 0.0,
        **optional,
        **factors,
    )


def _number(value: object, name: str) -> float:
    if value == 0 and name.endswith(_MAY_BE_ZERO):
        return 0.0
    return positive_number(value, name)


def _check_together(rope_type: str, numbers: Mapping[str, float], name: str) -> None:
    """Refuse numbers by which the frequencies would be no numbers, or the positions more than any model's."""
    original = numbers["original_max_position_embeddings"]
    if numbers["rope_theta"] <= 1:
        raise UnsupportedModel(f"config.json: rope_theta must be above 1, not {numbers['rope_theta']}")
    if not 1 <= original <= LARGEST:
        raise UnsupportedModel(
            f"config.json: original_max_position_embeddings {original} is no length that a model has"
        )
    if rope_type == "yarn" and numbers["factor"] * original > LARGEST:
        raise UnsupportedModel(
            f"config.json: {name}.factor {numbers['factor']} makes a context that is beyond any model's"
        )
    if rope_type == "longrope" and original < 2:
        raise UnsupportedModel(
            f"config.json: original_max_position_embeddings of rope_type 'longrope' must be 2 or more, not "
            f"{original}"
        )
    if rope_type == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise UnsupportedModel(f"config.json: {name}.high_freq_factor must be above low_freq_factor")


def _rotary_dim(given: Mapping[str, Any], head_dim: int, rule: RopeRule) -> int | None:
    """None: all of head_dim."""
    partial = given.get("partial_rotary_factor", 1.0 if rule.partial is None else rule.partial)
    if partial == 1.0:
        return None
    rotary = int(head_dim * partial)
    if rule.partial is None or not 0 < rotary < head_dim or rotary % 2:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor {partial} is not supported"
            + ("; 1.0 is" if rule.partial is None else f" with head_dim {head_dim}")
        )
    return rotary


def _factors(values: object, name: str, pairs: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != pairs:
        raise UnsupportedModel(f"config.json: {name} must be {pairs} numbers")
    return tuple(positive_number(value, f"{name}[{place}]") for place, value in enumerate(values))
