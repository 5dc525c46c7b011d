"""The fields of config.json that make a model's MLPs mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import flag, positive, positive_number

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
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's logits become."""
    bias: str | None = None
    """Tensor of a layer that is added to the scores by which experts are chosen, not to their weights."""
    wide_router: bool = False
    """The router works in float32."""
    shared: str | None = None
    """Tensors of a layer: an MLP of all tokens, SHARED.gate_proj.weight and so on."""
    shared_size: str | None = None
    """Field: its width."""
    shared_count: str | None = None
    """Or the field with how many experts wide it is."""
    shared_gate: str | None = None
    """Tensor of a layer, without `.weight`: what the MLP adds is multiplied by its sigmoid."""
    first_dense: str | None = None
    """Field: so many layers at the beginning have one plain MLP."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of config.json that are read."""
        names = {*self.counts, self.size, "num_experts_per_tok", "norm_topk_prob"}
        names |= {
            name for name in (self.shared_size, self.shared_count, self.first_dense) if name is not None
        }
        if self.first_dense is None:
            names |= {"mlp_only_layers", "decoder_sparse_step"}
        if self.scoring == "sigmoid":
            names |= {"n_group", "topk_group", "routed_scaling_factor"}
        return frozenset(names)


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
    groups: int = 1
    """Experts are chosen among those of the best groups."""
    top_groups: int = 1
    scale: float = 1.0
    """Of the weights of a token's experts."""
    shared_size: int = 0
    """Width of the MLP that all tokens go through beside their experts; 0: none."""

    @property
    def is_plain(self) -> bool:
        """Softmax of the logits, the best of all experts, and these alone."""
        names = self.names
        chosen = names.scoring == "softmax" and names.bias is None and self.groups == 1 and self.scale == 1.0
        return chosen and not self.shared_size and not names.wide_router


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
    sparse = {layer for layer in range(num_layers) if (layer + 1) % step == 0} - set(dense)
    if names.first_dense is not None:
        sparse = set(range(_count(fields, names.first_dense), num_layers))
    groups, top_groups, scale = 1, 1, 1.0
    if names.scoring == "sigmoid":
        groups, top_groups = positive(fields, "n_group", 1), positive(fields, "topk_group", 1)
        scale = positive_number(fields.get("routed_scaling_factor", 1.0), "routed_scaling_factor")
        if (
            top_groups > groups
            or count % groups
            or count // groups < 2
            or count // groups * top_groups < per_token
        ):
            raise UnsupportedModel(
                f"config.json: {per_token} experts of the best {top_groups} of {groups} groups (topk_group, "
                f"n_group) cannot be chosen among {count}"
            )
    size = positive(fields, names.size)
    shared = positive(fields, names.shared_size) if names.shared_size is not None else 0
    if names.shared_count is not None:
        shared = size * _count(fields, names.shared_count)
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        renormalize=flag(fields, "norm_topk_prob") if names.renormalize is None else names.renormalize,
        dense_layers=frozenset(range(num_layers)) - sparse,
        names=names,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        shared_size=shared,
    )


def _count(fields: Mapping[str, Any], name: str) -> int:
    """Absent is 0."""
    return positive(fields, name) if fields.get(name) else 0
