"""Rotary settings out of config.json, in either spelling.

transformers 5 writes `rope_parameters` with rope_theta inside, older versions `rope_scaling` beside it.
Owns the refusal, by field name, of what models/rope.py does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.engine.errors import UnsupportedModel

__all__ = ["ROPE_FIELDS", "RopeConfig", "read_rope"]

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
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
    "rope_theta",
    "original_max_position_embeddings",
)
ROPE_FIELDS = frozenset(
    {*_NUMBERS, "rope_type", "type", "truncate", "partial_rotary_factor", "mrope_section"}
)
"""Fields that are read; mrope_section sets apart axes of images, and a text's positions are equal on all."""


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Rotary embedding. Fields that a type does not use keep their defaults."""

    rope_type: str
    """default | linear | dynamic | llama3 | yarn"""
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Length the model was pretrained at (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """yarn: cos and sin are multiplied by it; None: derived from factor (and mscale, mscale_all_dim)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(fields: Mapping[str, Any]) -> RopeConfig:
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
    if rope_type not in _NEEDED:
        raise UnsupportedModel(
            f"config.json: {name} has rope_type {rope_type!r}; supported are {', '.join(_NEEDED)}"
        )
    partial = given.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial} is not supported; 1.0 is")
    given.setdefault("rope_theta", fields.get("rope_theta", 10_000.0))
    whole = fields.get("max_position_embeddings", 0)
    # The outer field, where present, overrides the inner one; the whole length stands in for both.
    if "original_max_position_embeddings" in fields:
        given["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    given.setdefault("original_max_position_embeddings", whole)
    for key in _NEEDED[rope_type]:
        if key not in given:
            raise UnsupportedModel(f"config.json: {name} of rope_type {rope_type!r} lacks {key}")
    for key in _NUMBERS:
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int | float)):
            raise UnsupportedModel(f"config.json: {name}.{key} must be a number, not {given[key]!r}")
    if rope_type == "yarn":
        given.setdefault("factor", whole / (given["original_max_position_embeddings"] or 1))
    optional = {key: float(given[key]) for key in _NUMBERS[:8] if key in given}
    return RopeConfig(
        rope_type=rope_type,
        theta=float(given["rope_theta"]),
        original_max_position_embeddings=int(given["original_max_position_embeddings"]),
        truncate=bool(given.get("truncate", True)),
        **optional,
    )
