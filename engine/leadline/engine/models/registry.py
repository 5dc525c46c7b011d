"""Family name → the class that builds it. All present families are one decoder; another kind enters here."""

from __future__ import annotations

import torch

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.parallel import SINGLE, TensorParallel

__all__ = ["BUILDERS", "build_model"]

BUILDERS: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "smollm3": Decoder,
    "phi3": Decoder,
    "mixtral": Decoder,
    "qwen3_moe": Decoder,
}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel = SINGLE,
    max_positions: int | None = None,
    matrices_later: bool = False,
) -> Decoder:
    """The model with unset weights; `matrices_later`: those of linears and experts are not allocated yet."""
    builder = BUILDERS.get(config.family)
    if builder is None:
        raise UnsupportedModel(f"no decoder for family {config.family!r}; there are {', '.join(BUILDERS)}")
    return builder(
        config,
        dtype=dtype,
        device=device,
        tp=tp,
        max_positions=max_positions,
        matrices_later=matrices_later,
    )
