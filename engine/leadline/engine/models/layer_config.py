"""What sets the layers of one model apart: their sliding window and their rotation, out of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import flag, positive
from leadline.engine.models.rope_config import RopeConfig, read_rope

__all__ = ["LayerConfig", "WindowRule", "read_layers"]

_FULL, _SLIDING = "full_attention", "sliding_attention"


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

    layers: Literal["none", "all", "from max_window_layers", "unrotated"] = "none"
    switch: bool = False
    """Only if use_sliding_window is true."""


def read_layers(
    fields: Mapping[str, Any], num_layers: int, windows: WindowRule, *, unrotated: bool
) -> tuple[LayerConfig, ...]:
    """`unrotated`: the family has layers without rotation. Raises UnsupportedModel naming the field."""
    rope = read_rope(fields)
    still = _unrotated(fields, num_layers) if unrotated else frozenset()
    sliding = _sliding(fields, num_layers, windows, still)
    window = positive(fields, "sliding_window") if sliding and "sliding_window" in fields else None
    return tuple(
        LayerConfig(window if layer in sliding else None, None if layer in still else rope)
        for layer in range(num_layers)
    )


def _sliding(
    fields: Mapping[str, Any], num_layers: int, windows: WindowRule, still: frozenset[int]
) -> frozenset[int]:
    """The layers with a window."""
    kinds = _kinds(fields, num_layers)
    if windows.switch and not flag(fields, "use_sliding_window"):
        return frozenset()
    if kinds:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    if windows.layers == "none":
        return frozenset()
    if windows.layers == "unrotated":
        return still
    first = 0
    if windows.layers == "from max_window_layers" and fields.get("max_window_layers"):
        first = positive(fields, "max_window_layers")
    return frozenset(range(first, num_layers))


def _kinds(fields: Mapping[str, Any], num_layers: int) -> list[str]:
    """layer_types; [] where it is absent."""
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModel(f"config.json: layer_types must be a list of names, not {kinds!r}")
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
