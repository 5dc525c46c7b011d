"""What a checkpoint is served for, and how it turns an input into numbers: read from its files.

    config.json                         an encoder or a decoder; a head that scores
    modules.json, 1_Pooling/config.json how token states become one vector, and whether it is normalised
    sentence_bert_config.json           max_seq_length
    config_sentence_transformers.json   the model's own prompts

The last four are sentence-transformers' files. Without them an encoder takes the mean of its token states, as
sentence-transformers does, and a decoder its last token's, normalised. What the files ask for beyond that is
refused by name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError, ModelNotFound, UnsupportedModel
from leadline.engine.models.config import ModelConfig, load_model_config
from leadline.engine.models.encoder_config import EncoderConfig, encoder_of, read_encoder
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["Pooling", "PoolingSpec", "Task", "check_supported", "encoder_in", "read_pooling", "task_of"]

Task = Literal["generate", "embed", "rerank"]
Pooling = Literal["cls", "mean", "last"]

_MODES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_SIGMOID, _IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@dataclass(slots=True, frozen=True)
class PoolingSpec:
    """How a model is served that embeds or reranks."""

    task: Literal["embed", "rerank"]
    model: EncoderConfig | ModelConfig
    pooling: Pooling
    """Which token states become the vector; of a model that reranks: which one is scored."""
    normalize: bool
    max_tokens: int
    """Tokens of the longest input, special tokens included."""
    sigmoid: bool = False
    """Of a head's score."""
    answers: tuple[int, int] | None = None
    """Of a decoder that reranks: the tokens "yes" and "no". The score is the share of "yes" in their
    probabilities."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name → text that goes in front of an input."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    dimensions: tuple[int, ...] = ()
    """Lengths to which a vector may be cut, as config.json lists them; empty: any."""

    @property
    def encoder(self) -> EncoderConfig | None:
        return self.model if isinstance(self.model, EncoderConfig) else None


def task_of(folder: str | Path, asked: str = "auto") -> Task:
    """Return what the model in `folder` is served for. `asked`: EngineConfig.task.

    Raises ModelNotFound without a readable config.json, ConfigError for a task that it does not serve."""
    raw = _config(Path(folder))
    architecture = encoder_of(raw)
    if architecture is not None:
        own: Task = "rerank" if architecture.endswith("ForSequenceClassification") else "embed"
        if asked not in ("auto", own):
            does = "scores pairs of texts" if own == "rerank" else "embeds texts"
            raise ConfigError(f"task {asked!r}: {architecture} {does}; use --task {own}, or leave it out")
        return own
    if asked == "auto":
        modules = [module.rpartition(".")[2] for module in _modules(Path(folder))]
        return "rerank" if "LogitScore" in modules else "embed" if "Pooling" in modules else "generate"
    return asked  # type: ignore[return-value]


def encoder_in(folder: str | Path) -> EncoderConfig | None:
    """Read the encoder in `folder`; None for another model. Raises as `read_pooling`."""
    raw = _config(Path(folder))
    return None if encoder_of(raw) is None else read_encoder(raw)


def check_supported(folder: Path) -> None:
    """Raise UnsupportedModel for a config.json with anything that we do not honour, for any task."""
    raw = _config(folder)
    if encoder_of(raw) is not None:
        read_encoder(raw)
    else:
        load_model_config(folder)


def read_pooling(folder: str | Path, config: EngineConfig) -> PoolingSpec | None:
    """Read how the model in `folder` embeds or reranks; None for a model that generates.

    Raises ModelNotFound, ConfigError for settings that do not fit, UnsupportedModel for what is not
    implemented."""
    path = Path(folder)
    task = task_of(path, config.task)
    if task == "generate":
        return None
    _refuse_settings(config, task)
    raw = _config(path)
    if encoder_of(raw) is not None:
        return _of_encoder(path, raw, config, task)
    return _of_decoder(path, raw, config, task)


def _of_encoder(path: Path, raw: dict[str, Any], config: EngineConfig, task: Task) -> PoolingSpec:
    encoder = read_encoder(raw)
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization!r} is for decoders, not for {encoder.architecture}"
        )
    limit = _limit(path, raw, encoder.max_model_len, config)
    if task == "rerank":
        if encoder.labels != 1:
            raise UnsupportedModel(
                f"config.json: {encoder.architecture} has {encoder.labels} labels; one that reranks has one"
            )
        return PoolingSpec("rerank", encoder, "cls", False, limit, sigmoid=_has_sigmoid(raw))
    pooling, normalize = _pooling(path, default=("mean", False))
    return PoolingSpec("embed", encoder, pooling, normalize, limit, **_further(path, raw))


def _of_decoder(path: Path, raw: dict[str, Any], config: EngineConfig, task: Task) -> PoolingSpec:
    decoder = load_model_config(path)
    limit = _limit(path, raw, decoder.max_model_len, config)
    windows = {layer.window for layer in decoder.layers if layer.window is not None}
    if decoder.attention_softcap is not None or (windows and min(windows) < limit):
        raise UnsupportedModel(
            f"task {task!r}: {decoder.architecture} has attention with a "
            + ("cap" if decoder.attention_softcap is not None else f"window of {min(windows)} tokens")
            + ", which only generating models compute"
        )
    if task == "rerank":
        if decoder.family != "qwen3":
            raise UnsupportedModel(
                f"--task rerank of a decoder follows Qwen3-Reranker, and {decoder.architecture} is none"
            )
        return PoolingSpec("rerank", decoder, "last", False, limit, answers=_answers(path))
    pooling, normalize = _pooling(path, default=("last", True))
    return PoolingSpec("embed", decoder, pooling, normalize, limit, **_further(path, raw))


def _refuse_settings(config: EngineConfig, task: Task) -> None:
    if config.tensor_parallel > 1:
        raise ConfigError(f"tensor_parallel must be 1 with task {task!r}, not {config.tensor_parallel}")
    if config.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype does not apply to task {task!r}, which has no KV cache")
    if config.speculative_ngram:
        raise ConfigError(f"speculative_ngram does not apply to task {task!r}, which writes no tokens")


def _limit(path: Path, raw: Mapping[str, Any], model: int, config: EngineConfig) -> int:
    """Tokens of the longest input. Raises ConfigError above the model's own limit."""
    own = _read(path / "sentence_bert_config.json").get("max_seq_length")
    most = min(model, own) if isinstance(own, int) and not isinstance(own, bool) and own > 0 else model
    if config.max_model_len is not None and config.max_model_len > model:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of {model} tokens"
        )
    return config.max_model_len or most


def _pooling(path: Path, *, default: tuple[Pooling, bool]) -> tuple[Pooling, bool]:
    """(how states become a vector, whether it is normalised)."""
    modules = _modules(path)
    if not modules:
        return default
    normalize, pooling = False, default[0]
    for kind, place in modules.items():
        match kind.rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _mode(path / place / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise UnsupportedModel(
                    f"modules.json: {kind} is not supported; Transformer, Pooling and Normalize are"
                )
    return pooling, normalize


def _mode(file: Path) -> Pooling:
    fields = _read(file)
    if not fields:
        raise ModelNotFound(f"{file} is missing, which modules.json names")
    named = fields.get("pooling_mode")
    modes = (
        [named] if isinstance(named, str) else [name for key, name in _OLD_MODES.items() if fields.get(key)]
    )
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{file.parent.name}/config.json: pooling {' and '.join(modes) or 'of no kind'} is not "
            f"supported; one of {', '.join(_MODES)} is"
        )
    mode = _MODES[modes[0]]
    if mode == "mean" and fields.get("include_prompt") is False:
        raise UnsupportedModel(
            f"{file.parent.name}/config.json: include_prompt false is not supported with pooling mean"
        )
    return mode


def _further(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts, and the lengths of vectors."""
    fields = _read(path / "config_sentence_transformers.json")
    prompts = fields.get("prompts") or {}
    name = fields.get("default_prompt_name")
    texts = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not texts or (name is not None and name not in prompts):
        raise UnsupportedModel(
            "config_sentence_transformers.json: prompts must map names to texts, and default_prompt_name be "
            "one of them"
        )
    lengths = raw.get("matryoshka_dimensions") or ()
    if not isinstance(lengths, list | tuple) or not all(type(one) is int and one > 0 for one in lengths):
        raise UnsupportedModel(f"config.json: matryoshka_dimensions must be a list of sizes, not {lengths!r}")
    return {"prompts": prompts, "default_prompt": name, "dimensions": tuple(lengths)}


def _answers(path: Path) -> tuple[int, int]:
    """Return the token ids of "yes" and "no".

    Raises UnsupportedModel if the tokenizer lacks one of them, or if the model's files name other tokens.
    """
    tokenizer = Tokenizer.load(path)
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if yes is None or no is None:
        raise UnsupportedModel(
            "--task rerank of a decoder needs the tokens yes and no, as Qwen3-Reranker has them"
        )
    for kind, place in _modules(path).items():
        if kind.rpartition(".")[2] == "LogitScore":
            fields = _read(path / place / "config.json")
            if (fields.get("true_token_id"), fields.get("false_token_id")) != (yes, no):
                raise UnsupportedModel(
                    f"{place}/config.json: only scores of the tokens yes ({yes}) and no ({no}) are supported"
                )
    return yes, no


def _has_sigmoid(raw: Mapping[str, Any]) -> bool:
    """Whether a head's number becomes a score by a sigmoid, which is so where config.json says nothing."""
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = name or raw.get("sbert_ce_default_activation_function") or _SIGMOID
    if name not in (_SIGMOID, _IDENTITY):
        raise UnsupportedModel(
            f"config.json: activation_fn {name!r} is not supported; Sigmoid and Identity are"
        )
    return bool(name == _SIGMOID)


def _modules(path: Path) -> dict[str, str]:
    """Type → folder of each module of modules.json, in order; empty without that file."""
    file = path / "modules.json"
    if not file.is_file():
        return {}
    listed = _json(file)
    try:
        return {str(one["type"]): str(one.get("path", "")) for one in listed}
    except (TypeError, KeyError, AttributeError):
        raise UnsupportedModel("modules.json must be a list of objects with a type") from None


def _config(path: Path) -> dict[str, Any]:
    fields = _read(path / "config.json")
    if not fields:
        raise ModelNotFound(f"{path} is no model folder: it has no config.json")
    return fields


def _read(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not file.is_file():
        return {}
    value = _json(file)
    if not isinstance(value, dict):
        raise ModelNotFound(f"{file} holds no JSON object")
    return value


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from error
