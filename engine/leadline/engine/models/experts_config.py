"""The fields of config.json that make a model's MLPs mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import flag, positive

__all__ = ["ExpertNames", "ExpertsConfig", "read_experts"]


@dataclass(slots=True, frozen=True)
class ExpertNames:
    """What a family calls them."""

    counts: tuple[str, ...]
    """Fields, the first that is there: how many experts a layer has."""
    size: str
    """Field: the width of one."""
    router: str
    """Tensor of a layer, without `.weight`."""
    experts: str
    """Tensors of a layer: EXPERTS.NUMBER.GATE.weight and so on."""
    gate: str
    up: str
    down: str
    renormalize: bool | None = None
    """None: the field norm_topk_prob decides."""


@dataclass(slots=True, frozen=True)
class ExpertsConfig:
    """Experts of a layer, whatever its family."""

    count: int
    per_token: int
    intermediate_size: int
    renormalize: bool
    """The weights of a token's experts are made to add up to 1."""
    dense_layers: frozenset[int]
    """Layers that have one plain MLP instead."""
    names: ExpertNames


def read_experts(fields: Mapping[str, Any], names: ExpertNames, num_layers: int) -> ExpertsConfig:
    """Raises UnsupportedModel naming the field that makes no sense."""
    name = next((name for name in names.counts if name in fields), names.counts[0])
    count, per_token = positive(fields, name), positive(fields, "num_experts_per_tok")
    if per_token > count:
        raise UnsupportedModel(f"config.json: num_experts_per_tok {per_token} is more than {name} {count}")
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UnsupportedModel(f"config.json: mlp_only_layers must be a list of layers, not {dense!r}")
    step = positive(fields, "decoder_sparse_step", 1)
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=positive(fields, names.size),
        renormalize=flag(fields, "norm_topk_prob") if names.renormalize is None else names.renormalize,
        dense_layers=frozenset(dense) | {layer for layer in range(num_layers) if (layer + 1) % step},
        names=names,
    )
