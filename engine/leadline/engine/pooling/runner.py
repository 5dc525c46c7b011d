"""One step of a model that embeds or reranks: packed inputs in, a row of float32 values for each out.

inputs of all requests, packed ─▶ model ─▶ token states ─▶ cls | mean | last ─▶ [normalise] ─▶ vectors
                                                        └▶ first token ─▶ head ─▶ [sigmoid] ─▶ scores
                                                        └▶ last token ─▶ logits of yes and no ─▶ scores
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from leadline.engine.config import EngineConfig
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.encoder import Encoder
from leadline.engine.models.encoder_config import EncoderConfig
from leadline.engine.models.loader import load_encoder, load_model
from leadline.engine.pooling.packed_attention import PackedAttention
from leadline.engine.pooling.spec import PoolingSpec
from leadline.engine.runner.memory import out_of_memory_is_typed
from leadline.engine.runner.shard import (
    check_fp8,
    resolve_context,
    resolve_device,
    resolve_dtype,
    set_cpu_threads,
)
from leadline.engine.system.progress import ReportStage, no_report

__all__ = ["PoolingRunner", "build_pooling_runner"]


def build_pooling_runner(
    config: EngineConfig,
    local: LocalModel,
    spec: PoolingSpec,
    *,
    progress: bool = True,
    report: ReportStage = no_report,
) -> PoolingRunner:
    """Load the model. Raises ConfigError, UnsupportedModel, ModelNotFound, OutOfMemory."""
    device = resolve_device(config)
    dtype = resolve_dtype(config, spec.model, device)
    if device.type == "cpu":
        set_cpu_threads(config)
    model: Encoder | Decoder
    with out_of_memory_is_typed(config, "while loading weights"):
        if isinstance(spec.model, EncoderConfig):
            model = load_encoder(
                local,
                spec.model,
                dtype=dtype,
                device=device,
                load_format=config.load_format,
                progress=progress,
                report=report,
                seed=config.seed,
            )
        else:
            check_fp8(config, dtype, device, loaded=False)
            resolve_context(config.replace(max_model_len=spec.max_tokens), spec.model)
            model = load_model(
                local,
                spec.model,
                dtype=dtype,
                device=device,
                load_format=config.load_format,
                progress=progress,
                report=report,
                seed=config.seed,
                max_positions=spec.max_tokens,
                quantization=config.quantization,
                headless=spec.answers is None,
            )
    return PoolingRunner(model, spec)


class PoolingRunner:
    """A loaded model."""

    def __init__(self, model: Encoder | Decoder, spec: PoolingSpec) -> None:
        self._model, self._spec = model, spec
        self.device = model.device

    @torch.inference_mode()
    def run(self, inputs: Sequence[Sequence[int]], boundaries: Sequence[int | None]) -> np.ndarray:
        """Token ids of each input, and where its second text begins → float32 [inputs, values]."""
        lengths = [len(ids) for ids in inputs]
        device = self.device
        ids = torch.from_numpy(np.concatenate([np.asarray(one, np.int64) for one in inputs])).to(device)
        places = np.concatenate([np.arange(length) for length in lengths])
        positions = torch.from_numpy(places).to(device)
        ends = torch.tensor(lengths).cumsum(0).to(device) - 1
        if isinstance(self._model, Encoder):
            attend = PackedAttention(lengths, device, causal=False)
            types = None
            if any(boundary is not None for boundary in boundaries):
                seconds = np.repeat(
                    [length if at is None else at for at, length in zip(boundaries, lengths, strict=True)],
                    lengths,
                )
                types = torch.from_numpy((places >= seconds).astype(np.int64)).to(device)
            hidden = self._model.forward(ids, positions, types, attend)
        else:
            attend = PackedAttention(lengths, device, causal=True, scale=self._model.attention_scale)
            rows = ends if self._spec.pooling == "last" else None
            hidden = self._model.forward(ids, positions, attend, rows=rows)
        values: np.ndarray = self._values(hidden, lengths, ends).float().cpu().numpy()
        return values

    def _values(self, hidden: torch.Tensor, lengths: Sequence[int], ends: torch.Tensor) -> torch.Tensor:
        """Token states (of a decoder that takes the last one: those alone) → [inputs, values]."""
        spec, model = self._spec, self._model
        match spec.pooling:
            case "last":
                pooled = hidden if isinstance(model, Decoder) else hidden.index_select(0, ends)
            case "cls":
                sizes = torch.tensor(lengths, device=hidden.device)
                pooled = hidden.index_select(0, ends + 1 - sizes)
            case "mean":
                sizes = torch.tensor(lengths, device=hidden.device)
                pooled = torch.segment_reduce(hidden.float(), "mean", lengths=sizes, axis=0)
        if spec.answers is not None:
            assert isinstance(model, Decoder)
            yes, no = model.compute_logits(pooled).float()[:, list(spec.answers)].unbind(1)
            return torch.sigmoid(yes - no)[:, None]
        if spec.task == "rerank":
            assert isinstance(model, Encoder)
            scores = model.classify(pooled).float()
            return torch.sigmoid(scores) if spec.sigmoid else scores
        return F.normalize(pooled.float(), dim=-1) if spec.normalize else pooled
