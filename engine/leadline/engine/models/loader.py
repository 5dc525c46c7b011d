"""Weights: from safetensors files, or a GGUF file, into a model, one tensor at a time.

The model is allocated first, in its final form and place; each tensor (or this rank's slice of it, read as
a slice) is then copied over and quantized or dequantized on the way, so that beside the model there is never
more than one tensor in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from leadline.engine.errors import ConfigError, ModelNotFound, UnsupportedModel
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.encoder import Encoder
from leadline.engine.models.encoder_config import EncoderConfig
from leadline.engine.models.forms import allocate_matrices
from leadline.engine.models.layers import Slot
from leadline.engine.models.parallel import TensorParallel
from leadline.engine.models.quantized_config import QuantizedConfig, StoredAs
from leadline.engine.models.quantized_files import StoredLinear
from leadline.engine.models.targets import FP8Rows, RoundedRows
from leadline.engine.system.progress import ByteMeter, ReportStage, no_report, progress_bar

__all__ = ["load_encoder", "load_model"]

logger = logging.getLogger("leadline.engine.models")

_DUMMY_STD = 0.02
_HEADS_OF_ENCODERS = ("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids")
_LAYER_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
"""Its tensors in the oldest checkpoints of encoders."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
    headless: bool = False,
) -> Decoder:
    """Build the model on `device` and fill it. `local` may be a folder.

    `collectives` carries all_reduce and all_gather where tp_size > 1. `load_format="dummy"` draws small
    random weights from `seed` instead of reading any. `max_positions` shortens the rotary tables to the
    engine's context. `quantization="fp8"` rounds the layers' linears as they are read; `fp8_kv` scales keys
    and values for a cache in FP8. `headless`: the model gives hidden states only, and its files may lack the
    head and the prefix `model.`. `progress`: a bar on stderr; `report` hears how many of this rank's bytes
    are read.
    Raises ModelNotFound (no safetensors, unreadable), UnsupportedModel (tensors missing, unexpected or of
    another shape), ConfigError (the model cannot be split over the ranks, or is quantized already).
    """
    if quantization is not None and config.quantized is not None:
        raise ConfigError(
            f"quantization {quantization!r} is for checkpoints in 16 or 32 bits; this one is quantized "
            f"already ({config.quantized.method}): leave it out"
        )
    tp = TensorParallel(tp_rank, tp_size) if collectives is None else collectives
    if collectives is not None:
        tp = dataclasses.replace(collectives, rank=tp_rank, size=tp_size)
    weights: _Weights | None = None
    if load_format != "dummy":
        weights = _Weights(
            local.path if isinstance(local, LocalModel) else Path(local), wrapped=config.wrapped
        )
        if headless:
            weights.rename(lambda name: name if name.startswith(("model.", _HEAD)) else f"model.{name}")
        else:
            config = _tied_as_stored(config, weights)
    if headless:
        config = dataclasses.replace(config, tie_word_embeddings=True)  # allocates no head
    with torch.inference_mode():
        model = Decoder(
            config,
            dtype=dtype,
            device=torch.device(device),
            tp=tp,
            max_positions=max_positions,
            matrices_later=quantization is not None or config.quantized is not None,
        )
        stored = _StoredModules(config.quantized, weights)
        if quantization is not None or config.quantized is not None:
            allocate_matrices(model, stored.of, quantization)
        if weights is None:
            _fill_randomly(model, seed)
        else:
            _fill(model, weights, stored, progress and tp_rank == 0, report)
        model.settle()
        if fp8_kv:
            from leadline.engine.models.kv_scales import fold_kv_scales

            fold_kv_scales(model)
        model.finalize()
        if model.writes_kv and not model.variant:
            from leadline.engine.models.few_rows import FewRows

            model.few_rows = FewRows.of(model)
    return model


def load_encoder(
    local: LocalModel | str | Path,
    config: EncoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    progress: bool = True,
    report: ReportStage = no_report,
    seed: int = 0,
) -> Encoder:
    """As `load_model`, for an encoder. Heads that `config` does not name are skipped."""
    with torch.inference_mode():
        model = Encoder(config, dtype=dtype, device=torch.device(device))
        if load_format == "dummy":
            _fill_randomly(model, seed)
        else:
            weights = _Weights(local.path if isinstance(local, LocalModel) else Path(local))
            weights.rename(lambda name: _LAYER_NORM.sub(_new_name, name.removeprefix(f"{config.prefix}.")))
            _fill(model, weights, _StoredModules(None, weights), progress, report)
        model.finalize()
    return model


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards an index names, or whatever safetensors files there are, or a GGUF
    file."""
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
        files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"{folder} has no *.safetensors; other weight formats are not read")
    return files


_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def _name(stored: str) -> str:
    """The name that a tensor of a text half has in a model of text alone."""
    for marked, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if stored.startswith(marked):
            return plain + stored.removeprefix(marked)
    return stored.removeprefix("language_model.")


class _Weights:
    """The tensors of a folder: which file has each.

    Raises ModelNotFound for files that cannot be read, UnsupportedModel for a tensor that two files have: one
    would silently win. wrapped: the text half of a model of text and images; names lose what marks them as
    such, and the other tensors are left out with one warning.
    """

    def __init__(self, folder: Path, *, wrapped: bool = False) -> None:
        self.files: dict[Path, dict[str, str]] = {}
        """Of each file: name → what the file calls it."""
        self.file_of: dict[str, Path] = {}
        skipped: list[str] = []
        for file in _weight_files(folder):
            with self.open(file) as tensors:
                stored = list(tensors.keys())
            if wrapped:
                skipped += [name for name in stored if name.startswith(_NOT_TEXT)]
                stored = [name for name in stored if not name.startswith(_NOT_TEXT)]
            self.files[file] = {_name(one) if wrapped else one: one for one in stored}
            for name in self.files[file]:
                if name in self.file_of:
                    raise UnsupportedModel(
                        f"tensor {name} is in both {self.file_of[name].name} and {file.name}; remove the "
                        "files that do not belong to this model"
                    )
                self.file_of[name] = file
        if skipped:
            logger.warning(
                "only the text half of this model is served: %d tensors of images are not loaded (%s)",
                len(skipped),
                _some(sorted({name.rpartition(".layers.")[0] or name for name in skipped})),
            )

    def rename(self, new: Callable[[str], str]) -> None:
        """Know each tensor by the `new` name of its name in the file."""
        self.file_of = {new(name): file for name, file in self.file_of.items()}
        self.files = {
            file: {new(name): stored for name, stored in names.items()} for file, names in self.files.items()
        }

    @staticmethod
    @contextlib.contextmanager
    def open(file: Path) -> Iterator[Any]:
        if file.suffix == ".gguf":
            from leadline.engine.models.gguf_weights import GGUFTensors

            yield GGUFTensors(file)
            return
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                yield tensors
        except SafetensorError as error:
            raise ModelNotFound(f"{file} cannot be read ({error}); is the download complete?") from error

    def tensor(self, name: str) -> torch.Tensor:
        with self.open(self.file_of[name]) as tensors:
            value: torch.Tensor = tensors.get_tensor(self.files[self.file_of[name]][name])
            return value


class _StoredModules:
    """How a checkpoint stores each linear: as config.json says, unless its files hold a plain weight.

    GPTQ's and AWQ's config.json do not name the modules that are left alone, such as routers.
    """

    def __init__(self, config: QuantizedConfig | None, weights: _Weights | None) -> None:
        self._config = config
        self._names = None if weights is None else weights.file_of

    @property
    def any(self) -> bool:
        """Whether some linear may be stored otherwise than plainly."""
        return self._config is not None

    def of(self, module: str) -> StoredAs | None:
        """Return how the weight of a linear is stored; None: plainly."""
        stored = None if self._config is None else self._config.of(module)
        if stored is None or self._names is None:
            return stored
        if f"{module}.{stored.scale}" not in self._names and f"{module}.weight" in self._names:
            return None
        return stored


_UNREAD = (
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "qzeros",
    "g_idx",
)
"""Tensors of quantized modules that are read beside their weight, or not at all."""


def _tied_as_stored(config: ModelConfig, weights: _Weights) -> ModelConfig:
    """A head of its own, where config.json ties it to the embedding and the files hold another one. That is
    what transformers does."""
    if not config.tie_word_embeddings or not {_EMBEDDING, _HEAD} <= weights.file_of.keys():
        return config
    embedding = weights.tensor(_EMBEDDING)
    if torch.equal(embedding, weights.tensor(_HEAD).to(embedding.dtype)):
        return config
    logger.warning(
        "config.json has tie_word_embeddings, but %s and %s differ: the head is not tied", _EMBEDDING, _HEAD
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _fill(
    model: Decoder | Encoder,
    weights: _Weights,
    stored: _StoredModules,
    progress: bool,
    report: ReportStage,
) -> None:
    wanted: dict[str, list[Slot]] = {}
    quantized: dict[str, tuple[str, StoredAs]] = {}
    for name, slot in model.slots():
        module = name.removesuffix(".weight")
        if len(slot.shape) == 2 and module != name and (how := stored.of(module)) is not None:
            name = f"{module}.{how.weight}"
            quantized[name] = module, how
        wanted.setdefault(name, []).append(slot)
    ignored: set[str] = set()
    if isinstance(model, Encoder):
        ignored |= {name for name in weights.file_of if name.startswith(_HEADS_OF_ENCODERS)} - wanted.keys()
    elif model.config.tie_word_embeddings:
        # One tensor stands for both, under either name.
        if _EMBEDDING not in weights.file_of and _HEAD in weights.file_of:
            wanted[_HEAD] = wanted.pop(_EMBEDDING)
        else:
            ignored.add(_HEAD)
    for module, how in quantized.values():
        ignored |= {f"{module}.{name}" for name in (how.scale, how.global_scale)}
    total = sum(slot.target.nbytes for slots in wanted.values() for slot in slots)
    meter = ByteMeter("loading weights", total, report)
    with progress_bar(
        shown=progress,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="loading weights",
    ) as bar:
        for file, names in weights.files.items():
            with _Opened(weights, file) as tensors:
                for name in names:
                    for slot in wanted.get(name, ()):
                        if name in quantized:
                            _convert(*quantized[name], tensors, slot)
                        else:
                            _copy(name, tensors.get(name), slot)
                        bar.update(slot.target.nbytes)
                        meter.add(slot.target.nbytes)
    # Old checkpoints carry buffers that we compute.
    passed_over = ("rotary_emb.inv_freq", *(_UNREAD if stored.any else ()))
    if isinstance(model, Decoder):
        extra = range(model.num_layers, model.num_layers + model.config.extra_layers)
        beyond = tuple(f"model.layers.{number}." for number in extra)
        ignored |= {name for name in weights.file_of if name.startswith(beyond)}
    unexpected = [
        name
        for name in weights.file_of
        if name not in wanted and name not in ignored and not name.endswith(passed_over)
    ]
    missing = wanted.keys() - weights.file_of.keys()
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


class _Opened(contextlib.ExitStack):
    """One file of weights, and any other that has a tensor of the same module."""

    def __init__(self, weights: _Weights, file: Path) -> None:
        super().__init__()
        self._weights = weights
        self._files = {file: self.enter_context(weights.open(file))}

    def get(self, name: str) -> Any:
        """Return the safetensors slice of a tensor, or None if no file has it."""
        file = self._weights.file_of.get(name)
        if file is None:
            return None
        if file not in self._files:
            self._files[file] = self.enter_context(self._weights.open(file))
        return self._files[file].get_slice(self._weights.files[file][name])


def _copy(name: str, source: Any, slot: Slot) -> None:
    """Copy the rank's part of `source` (a safetensors slice), converting the dtype."""
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != slot.shape:
        raise UnsupportedModel(
            f"tensor {name} has shape {list(shape)}; config.json implies {list(slot.shape)}"
        )
    if dtype not in ("F32", "F16", "BF16", "F64"):
        raise UnsupportedModel(
            f"tensor {name} has dtype {dtype}, which config.json does not say: it has no quantization_config "
            "for it"
        )
    if 0 in slot.target.shape:
        return  # this rank's part is padding
    part = slice(slot.start, slot.start + slot.target.shape[slot.dim])
    value = source[(slice(None),) * slot.dim + (part,)]
    if isinstance(slot.target, torch.Tensor):
        slot.target.copy_(value)
    elif isinstance(slot.target, FP8Rows | RoundedRows):
        slot.target.put(value)
    else:
        raise UnsupportedModel(f"tensor {name} is not quantized as quantization_config says")


def _convert(module: str, stored: StoredAs, tensors: _Opened, slot: Slot) -> None:
    """Fill a slot from the rank's part of a quantized linear."""
    if 0 in slot.target.shape:
        return
    height, width = slot.shape
    linear = StoredLinear(module, stored, (height, width), tensors.get)
    part = slice(slot.start, slot.start + slot.target.shape[slot.dim])
    rows, columns = (part, slice(0, width)) if slot.dim == 0 else (slice(0, height), part)
    if isinstance(slot.target, torch.Tensor):
        slot.target.copy_(linear.plain(rows, columns))
    else:
        slot.target.put_stored(linear, rows, columns)


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _new_name(old: re.Match[str]) -> str:
    return {"gamma": "weight", "beta": "bias"}[old[1]]


def _fill_randomly(model: Decoder | Encoder, seed: int) -> None:
    """Norm weights that change nothing, all else normal with a small deviation, drawn on the device, each
    rank its own."""
    rank, ones = (
        (0, 1.0) if isinstance(model, Encoder) else (model.tp.rank, 0.0 if model.config.norm_offset else 1.0)
    )
    generator = torch.Generator(model.device).manual_seed(seed * 1024 + rank)
    for name, slot in model.slots():
        if not isinstance(slot.target, torch.Tensor):
            slot.target.fill_randomly(_DUMMY_STD, generator)
        elif name.lower().endswith("norm.weight"):
            slot.target.fill_(ones)
        else:
            slot.target.normal_(0.0, _DUMMY_STD, generator=generator)
