"""What sets the layers of one model apart: their sliding window and their rotation, out of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import flag, positive
from leadline.engine.models.rope_config import RopeConfig, RopeRule, read_rope

__all__ = ["LayerConfig", "RotationRule", "WindowRule", "read_layers"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_NAMES = {"attention": _FULL}


@dataclass(slots=True, frozen=True)
class LayerConfig:
    """The attention of one layer."""

    window: int | None = None
    """Tokens that a query sees, its own included; None: all before it."""
    rope: RopeConfig | None = None
    """None: queries and keys are not rotated."""


@dataclass(slots=True, frozen=True)
class WindowRule:
    """The layers to which the field sliding_window applies, if the field layer_types is absent."""

    layers: Literal["none", "all", "from max_window_layers", "unrotated", "pattern"] = "none"
    """pattern: all but each `every`-th."""
    switch: bool = False
    """Only if use_sliding_window is true."""
    every: int = 0
    pattern_field: bool = False
    """The field sliding_window_pattern overrides `every`."""
    required: bool = False
    """layer_types may not be absent."""

    @property
    def fields(self) -> frozenset[str]:
        return frozenset({"sliding_window_pattern"} if self.pattern_field else ())


@dataclass(slots=True, frozen=True)
class RotationRule(RopeRule):
    """How layers rotate queries and keys, where config.json does not say it."""

    still: Literal["none", "listed", "full layers beside windows", "by position_embedding_type"] = "none"
    """Layers that do not. listed: no_rope_layers has a 0 for each; without it, every
    no_rope_layer_interval-th is one."""
    by_kind: bool = False
    """Layers with a window have a rotation of their own."""
    window_theta: float = 10_000.0
    """The theta of these, where no field says it."""
    window_field: str | None = None
    """That field, beside rope_parameters."""

    @property
    def fields(self) -> frozenset[str]:
        names = {name for name in (self.window_field, self.dim_field) if name is not None}
        if self.still == "listed":
            names |= {"no_rope_layers", "no_rope_layer_interval"}
        if self.still == "by position_embedding_type":
            names |= {"position_embedding_type"}
        return frozenset(names)


def read_layers(
    fields: Mapping[str, Any], num_layers: int, head_dim: int, windows: WindowRule, rotation: RotationRule
) -> tuple[LayerConfig, ...]:
    """Raises UnsupportedModel naming the field."""
    listed = _unrotated(fields, num_layers) if rotation.still == "listed" else frozenset()
    sliding = _sliding(fields, num_layers, windows, listed)
    window = positive(fields, "sliding_window") if sliding and "sliding_window" in fields else None
    full, local = _ropes(fields, head_dim, rotation)
    still = listed
    if rotation.still == "full layers beside windows" and "sliding_window" in fields:
        still = frozenset(range(num_layers)) - sliding
    if rotation.still == "by position_embedding_type" and fields.get("position_embedding_type") != "rope":
        still = frozenset(range(num_layers))
    return tuple(
        LayerConfig(
            window if layer in sliding else None,
            None if layer in still else local if layer in sliding else full,
        )
        for layer in range(num_layers)
    )


def _ropes(fields: Mapping[str, Any], head_dim: int, rotation: RotationRule) -> tuple[RopeConfig, RopeConfig]:
    """The rotation of layers without a window, and of those with one."""
    if not rotation.by_kind:
        rope = read_rope(fields, head_dim, rotation)
        return rope, rope
    both = fields.get("rope_parameters", {})
    if not isinstance(both, dict) or not set(both) <= {_FULL, _SLIDING}:
        raise UnsupportedModel(
            f"config.json: rope_parameters must be an object with {_FULL} and {_SLIDING}, not {both!r}"
        )
    plain = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    scaling = {"rope_scaling": fields["rope_scaling"]} if "rope_scaling" in fields else {}
    full = {**plain, "rope_parameters": both.get(_FULL) or {}, **scaling}
    theta = fields.get(rotation.window_field, rotation.window_theta) if rotation.window_field else None
    local = {**plain, "rope_theta": theta or rotation.window_theta}
    local["rope_parameters"] = both.get(_SLIDING) or {}
    return read_rope(full, head_dim, rotation), read_rope(local, head_dim, rotation)


def _sliding(
    fields: Mapping[str, Any], num_layers: int, windows: WindowRule, still: frozenset[int]
) -> frozenset[int]:
    """The layers with a window."""
    kinds = _kinds(fields, num_layers)
    if windows.required and not kinds:
        raise UnsupportedModel("config.json lacks layer_types")
    if windows.switch and not flag(fields, "use_sliding_window"):
        return frozenset()
    if kinds:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    if windows.layers == "none":
        return frozenset()
    if windows.layers == "unrotated":
        return still
    if windows.layers == "pattern":
        if "sliding_window" not in fields:
            return frozenset()
        every = (
            positive(fields, "sliding_window_pattern", windows.every)
            if windows.pattern_field
            else windows.every
        )
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every)
    first = 0
    if windows.layers == "from max_window_layers" and fields.get("max_window_layers"):
        first = positive(fields, "max_window_layers")
    return frozenset(range(first, num_layers))


def _kinds(fields: Mapping[str, Any], num_layers: int) -> list[str]:
    """layer_types; [] where it is absent."""
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModel(f"config.json: layer_types must be a list of names, not {kinds!r}")
    kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds]
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise UnsupportedModel(
            f"config.json: layer_types has {sorted(unknown)}; {_FULL} and {_SLIDING} are supported"
        )
    if kinds and len(kinds) != num_layers:
        raise UnsupportedModel(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers (num_hidden_layers)"
        )
    return kinds


def _unrotated(fields: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        interval = positive(fields, "no_rope_layer_interval")
        rotated = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        raise UnsupportedModel(
            f"config.json: no_rope_layers must be a 0 or a 1 for each of {num_layers} layers, not {rotated!r}"
        )
    return frozenset(layer for layer, rotates in enumerate(rotated) if not rotates)
