"""config.json and generation_config.json, read once into frozen dataclasses.

Owns the decision what is supported: anything a config asks for that the decoder would not honour raises
UnsupportedModel naming the field. Reads JSON only: never runs code out of a model's repository. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leadline.engine.errors import ModelNotFound, UnsupportedModel
from leadline.engine.models.experts_config import ExpertsConfig, read_experts
from leadline.engine.models.families import FAMILIES, WRAPPERS, Family, TensorNames, Wrapper
from leadline.engine.models.fields import MOST_LAYERS, flag, positive, positive_number
from leadline.engine.models.layer_config import LayerConfig, read_layers
from leadline.engine.models.quantized_config import QuantizedConfig, read_quantization
from leadline.engine.models.rope_config import RopeConfig
from leadline.engine.models.unread_fields import refuse_unread, unknown_fields

__all__ = [
    "GenerationDefaults",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "TensorNames",
    "load_model_config",
]

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """Sampling defaults out of generation_config.json; None where it says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Shapes and switches of a decoder, whatever its family. Sizes are the whole model's, not a rank's."""

    architecture: str
    """As in config.json, e.g. LlamaForCausalLM."""
    family: str
    """`families.Family.name`"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """q, k and v projections have a bias."""
    o_bias: bool
    mlp_bias: bool
    head_norms: str
    """Norms of queries and keys before their rotation: none | head | whole (over all heads of a token)."""
    norm_offset: bool
    """Norms multiply by 1 + weight."""
    activation: str
    """Of the gate: silu | gelu_tanh."""
    names: TensorNames
    """Of a checkpoint's tensors; they say where norms are."""
    dtype: str
    """The checkpoint's: float32 | float16 | bfloat16."""
    attention_scale: float = 0.0
    """q·k is multiplied by it."""
    attention_softcap: float | None = None
    """It is then capped: softcap * tanh(x / softcap)."""
    logits_softcap: float | None = None
    """The same of the logits."""
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """embedding_scale is rounded to the model's dtype first."""
    residual_scale: float = 1.0
    """Of what attention and MLP add."""
    extra_layers: int = 0
    """Layers behind the model's own that a checkpoint may hold; they draft tokens and are not loaded."""
    wrapped: bool = False
    """The text half of a model of text and images: tensors of the other half are skipped."""
    experts: ExpertsConfig | None = None
    """MLPs are mixtures of these."""
    quantized: QuantizedConfig | None = None
    """Weights of the checkpoint that are quantized."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a generation, out of generation_config.json and config.json."""
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    unknown_fields: tuple[str, ...] = ()
    """Fields of config.json that are set and that are not known here."""

    @property
    def max_model_len(self) -> int:
        """Positions the rotary embedding is good for.

        yarn: at least factor times the original length, since some configs leave max_position_embeddings at
        the latter. dynamic: max_position_embeddings, where its frequencies start to depend on the sequence's
        length; keys in a paged cache are rotated once and for all, so we do not go beyond.
        """
        ropes = {layer.rope for layer in self.layers if layer.rope is not None}
        stretched = [
            int(rope.factor * rope.original_max_position_embeddings)
            for rope in ropes
            if rope.rope_type == "yarn"
        ]
        return max([self.max_position_embeddings, *stretched])


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the folder `path`.

    Raises ModelNotFound without a readable config.json, UnsupportedModel naming the field we cannot honour.
    """
    folder = Path(path)
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ModelNotFound(f"{folder} is no model folder: it has no config.json")
    generation = _read_json(folder / "generation_config.json") or {}

    architecture = _architecture(raw)
    wrapper = WRAPPERS.get(architecture)
    if wrapper is not None:
        raw, family = _text_half(raw, architecture, wrapper)
    else:
        family = FAMILIES[architecture]
        _check_model_type(raw, architecture, family.name)
    # A default stands in for an absent field only: null has its own meaning (no window, one KV head a head).
    fields = {name: value for name, value in {**family.defaults, **raw}.items() if value is not None}
    refuse_unread(raw, family)
    activation = _activation(fields, family)

    hidden, heads = positive(fields, "hidden_size"), positive(fields, "num_attention_heads")
    if "head_dim" not in fields and hidden % heads:
        raise UnsupportedModel(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
            "and head_dim is absent"
        )
    head_dim = positive(fields, "head_dim", hidden // heads)
    kv_heads = positive(fields, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedModel(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
    num_layers = positive(fields, "num_hidden_layers", most=MOST_LAYERS)
    extra = family.extra_layers or ""
    qkv_bias, o_bias, mlp_bias = family.qkv_bias, family.o_bias, family.mlp_bias
    return ModelConfig(
        architecture=architecture,
        family=family.name,
        vocab_size=positive(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(fields, family.intermediate_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_number(fields.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        layers=read_layers(fields, num_layers, head_dim, family.windows, family.rotation),
        max_position_embeddings=positive(fields, "max_position_embeddings"),
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        attention_bias=flag(fields, "attention_bias") if qkv_bias is None else qkv_bias,
        o_bias=flag(fields, o_bias) if isinstance(o_bias, str) else o_bias,
        mlp_bias=flag(fields, "mlp_bias") if mlp_bias is None else mlp_bias,
        head_norms=_head_norms(fields, family),
        norm_offset=family.norm_offset,
        activation=activation,
        names=family.names,
        dtype=_dtype(fields),
        **_multipliers(fields, family, head_dim, hidden),
        wrapped=wrapper is not None,
        extra_layers=positive(fields, extra, most=MOST_LAYERS) if fields.get(extra) else 0,
        experts=None if family.experts is None else read_experts(fields, family.experts, num_layers),
        quantized=read_quantization(raw),
        bos_token_id=generation.get("bos_token_id", raw.get("bos_token_id")),
        eos_token_ids=_token_ids(
            {
                "generation_config.json": generation.get("eos_token_id"),
                "config.json": raw.get("eos_token_id"),
            },
            positive(fields, "vocab_size"),
        ),
        generation=GenerationDefaults(
            **{name: generation.get(name) for name in GenerationDefaults.__dataclass_fields__}
        ),
        unknown_fields=unknown_fields(raw, family.fields),
    )


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from error
    except RecursionError as error:
        raise ModelNotFound(f"{file} cannot be read: its values are nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{file} holds no JSON object")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"config.json: architectures must be a list of names, not {names!r}")
    for name in names:
        if name in FAMILIES or name in WRAPPERS:
            return name
    supported = ", ".join([*FAMILIES, *WRAPPERS])
    if not names:
        raise UnsupportedModel(f"config.json names no architectures; supported are {supported}")
    code = " (its own code, named in auto_map, is never run)" if raw.get("auto_map") else ""
    raise UnsupportedModel(f"config.json: architectures is {list(names)}{code}; supported are {supported}")


def _check_model_type(raw: Mapping[str, Any], architecture: str, expected: str) -> None:
    kind = raw.get("model_type")
    if kind is not None and kind != expected:
        raise UnsupportedModel(
            f"config.json: model_type {kind!r} contradicts the architecture {architecture}, which is "
            f"{expected!r}"
        )


def _text_half(raw: Mapping[str, Any], architecture: str, wrapper: Wrapper) -> tuple[dict[str, Any], Family]:
    """The fields of text_config, with those beside it that concern it, and its family."""
    _check_model_type(raw, architecture, wrapper.name)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UnsupportedModel(f"config.json: text_config must be an object, not {text!r}")
    families = {FAMILIES[name].name: FAMILIES[name] for name in wrapper.texts}
    kind = text.get("model_type") or next(iter(families))
    if not isinstance(kind, str) or kind not in families:
        raise UnsupportedModel(
            f"config.json: text_config.model_type {kind!r} is not supported for {architecture}; "
            f"{', '.join(families)} are"
        )
    beside = {
        name: value
        for name, value in raw.items()
        if name not in wrapper.fields and name not in ("architectures", "model_type", "text_config")
    }
    ignored = {"architectures": None, "_name_or_path": None}
    return {**wrapper.defaults, **text, **ignored, **beside, "model_type": kind}, families[kind]


def _head_norms(fields: Mapping[str, Any], family: Family) -> str:
    name = family.head_norms_field
    return family.head_norms if name is None or flag(fields, name) else "none"


def _multipliers(
    fields: Mapping[str, Any], family: Family, head_dim: int, hidden_size: int
) -> dict[str, Any]:
    """The fields of ModelConfig that config.json calls multipliers, scalings and caps."""
    values: dict[str, float] = {}
    for name in family.multipliers & fields.keys():
        values[name] = positive_number(fields[name], name)
    scale = values.get("query_pre_attn_scalar", float(head_dim)) ** -0.5
    return {
        "attention_scale": values.get("attention_multiplier", scale),
        "attention_softcap": values.get("attn_logit_softcapping"),
        "logits_softcap": values.get("final_logit_softcapping"),
        "logits_scale": 1.0 / values.get("logits_scaling", 1.0),
        "embedding_scale": values.get(
            "embedding_multiplier", hidden_size**0.5 if family.scaled_embedding else 1.0
        ),
        "rounds_embedding_scale": family.scaled_embedding,
        "residual_scale": values.get("residual_multiplier", 1.0),
    }


def _dtype(fields: Mapping[str, Any]) -> str:
    value = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    if value not in _DTYPES:
        raise UnsupportedModel(f"config.json: dtype {value!r} is not supported; {', '.join(_DTYPES)} are")
    return value


def _token_ids(sources: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    """All ids of all files in order, once each; a file may name one id, several or none. Ids beyond the
    vocabulary, which some files have, can never be generated and are left out."""
    ids: dict[int, None] = {}
    for file, source in sources.items():
        for token in source if isinstance(source, list) else [source]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise UnsupportedModel(f"{file}: eos_token_id must be a token id or several, not {source!r}")
            if 0 <= token < vocab_size:
                ids[token] = None
    return tuple(ids)


def _activation(fields: Mapping[str, Any], family: Family) -> str:
    name = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    asked = fields.get(name, "silu")
    if asked in ("silu", "swish"):
        return "silu"
    if asked == "gelu_pytorch_tanh" and family.experts is None:
        return "gelu_tanh"
    raise UnsupportedModel(
        f"config.json: {name} {asked!r} is not supported; silu is"
        + ("" if family.experts is not None else ", and gelu_pytorch_tanh")
    )
