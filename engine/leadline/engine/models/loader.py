"""Weights: from safetensors files into a model, one tensor at a time.

The model is allocated first, in its final dtype and place; each tensor (or this rank's slice of it, read as
a slice) is then copied over, so that beside the model there is never more than one tensor in memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from leadline.engine.errors import ModelNotFound, UnsupportedModel
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.layers import Slot
from leadline.engine.models.parallel import TensorParallel
from leadline.engine.models.registry import build_model
from leadline.engine.progress import ByteMeter, ReportStage, no_report

__all__ = ["load_model"]

_DUMMY_STD = 0.02


def load_model(
    local: LocalModel | str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp_rank: int = 0,
    tp_size: int = 1,
    collectives: TensorParallel | None = None,
    load_format: str = "auto",
    progress: bool = True,
    report: ReportStage = no_report,
    seed: int = 0,
    max_positions: int | None = None,
    quantization: str | None = None,
    fp8_kv: bool = False,
) -> Decoder:
    """Build the model on `device` and fill it. `local` may be a folder.

    `collectives` carries all_reduce and all_gather where tp_size > 1. `load_format="dummy"` draws small
    random weights from `seed` instead of reading any. `max_positions` shortens the rotary tables to the
    engine's context. `quantization="fp8"` rounds the layers' linears; `fp8_kv` scales keys and values for a
    cache in FP8. `progress`: a bar on stderr; `report` hears how many of this rank's bytes are read.
    Raises ModelNotFound (no safetensors, unreadable), UnsupportedModel (tensors missing, unexpected or of
    another shape), ConfigError (the model cannot be split over the ranks).
    """
    tp = TensorParallel(tp_rank, tp_size) if collectives is None else collectives
    if collectives is not None:
        tp = dataclasses.replace(collectives, rank=tp_rank, size=tp_size)
    with torch.inference_mode():
        model = build_model(
            config, dtype=dtype, device=torch.device(device), tp=tp, max_positions=max_positions
        )
        if load_format == "dummy":
            _fill_randomly(model, seed)
        else:
            folder = local.path if isinstance(local, LocalModel) else Path(local)
            _fill(model, _weight_files(folder), progress and tp_rank == 0, report)
        if fp8_kv:
            from leadline.engine.models.kv_scales import fold_kv_scales

            fold_kv_scales(model)
        if quantization == "fp8":
            model.quantize()
        model.finalize()
    return model


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards an index names, or whatever safetensors files there are."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelNotFound(f"{index} is no safetensors index: {error!r}") from error
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ModelNotFound(f"{index.name} names files that are not in {folder}: {_some(absent)}")
        return [folder / name for name in names]
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ModelNotFound(f"{folder} has no *.safetensors; other weight formats are not read")
    return files


def _fill(model: Decoder, files: list[Path], progress: bool, report: ReportStage) -> None:
    from safetensors import SafetensorError, safe_open
    from tqdm import tqdm

    wanted: dict[str, list[Slot]] = {}
    for name, slot in model.slots():
        wanted.setdefault(name, []).append(slot)
    missing, unexpected = set(wanted), []
    total = sum(slot.target.nbytes for slots in wanted.values() for slot in slots)
    meter = ByteMeter("loading weights", total, report)
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="loading weights",
        disable=not progress,
    ) as bar:
        for file in files:
            try:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        if name in wanted:
                            for slot in wanted[name]:
                                _copy(name, tensors.get_slice(name), slot)
                                bar.update(slot.target.nbytes)
                                meter.add(slot.target.nbytes)
                            missing.discard(name)
                        elif not _ignorable(name, model.config):
                            unexpected.append(name)
            except SafetensorError as error:
                raise ModelNotFound(f"{file} cannot be read ({error}); is the download complete?") from error
    if missing or unexpected:
        parts = [
            f"{kind}: {_some(sorted(names))}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UnsupportedModel(
            f"the weights do not fit the {model.config.architecture} that config.json describes; "
            + "; ".join(parts)
        )


def _copy(name: str, source: Any, slot: Slot) -> None:
    """Copy the rank's part of `source` (a safetensors slice), converting the dtype."""
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != slot.shape:
        raise UnsupportedModel(
            f"tensor {name} has shape {list(shape)}; config.json implies {list(slot.shape)}"
        )
    if dtype not in ("F32", "F16", "BF16", "F64"):
        raise UnsupportedModel(f"tensor {name} has dtype {dtype}; use an unquantized checkpoint")
    if not slot.target.numel():
        return  # this rank's part is padding
    part = slice(slot.start, slot.start + slot.target.shape[slot.dim])
    slot.target.copy_(source[(slice(None),) * slot.dim + (part,)])


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Buffers that old checkpoints carry and we compute, and a second copy of tied weights."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _fill_randomly(model: Decoder, seed: int) -> None:
    """Norm weights 1, all else normal with a small deviation, drawn on the device, each rank its own."""
    generator = torch.Generator(model.device).manual_seed(seed * 1024 + model.tp.rank)
    for name, slot in model.slots():
        if name.endswith("norm.weight"):
            slot.target.fill_(1.0)
        else:
            slot.target.normal_(0.0, _DUMMY_STD, generator=generator)
