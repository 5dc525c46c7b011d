"""config.json of an encoder (BERT, RoBERTa, XLM-RoBERTa), read once into a frozen dataclass.

Anything in it that the encoder would not honour raises UnsupportedModel naming the field. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fields import MOST_LAYERS, flag, positive, positive_number

__all__ = ["ENCODERS", "EncoderConfig", "EncoderFamily", "encoder_of", "read_encoder"]

_DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(slots=True, frozen=True)
class EncoderFamily:
    """What sets an architecture apart."""

    name: str
    """model_type in config.json."""
    prefix: str
    """In front of tensor names where the checkpoint has a head."""
    offset: bool = False
    """Positions are counted from pad_token_id + 1."""
    classifies: bool = False
    """It has a head that scores a sequence."""
    defaults: tuple[tuple[str, Any], ...] = ()


_BERT = (("type_vocab_size", 2), ("layer_norm_eps", 1e-12), ("pad_token_id", 0))
_ROBERTA = (("type_vocab_size", 2), ("layer_norm_eps", 1e-12), ("pad_token_id", 1))
ENCODERS: dict[str, EncoderFamily] = {
    "BertModel": EncoderFamily("bert", "bert", defaults=_BERT),
    "BertForMaskedLM": EncoderFamily("bert", "bert", defaults=_BERT),
    "BertForSequenceClassification": EncoderFamily("bert", "bert", classifies=True, defaults=_BERT),
    "RobertaModel": EncoderFamily("roberta", "roberta", offset=True, defaults=_ROBERTA),
    "RobertaForSequenceClassification": EncoderFamily(
        "roberta", "roberta", offset=True, classifies=True, defaults=_ROBERTA
    ),
    "XLMRobertaModel": EncoderFamily("xlm-roberta", "roberta", offset=True, defaults=_ROBERTA),
    "XLMRobertaForSequenceClassification": EncoderFamily(
        "xlm-roberta", "roberta", offset=True, classifies=True, defaults=_ROBERTA
    ),
}
"""Architecture in config.json → its traits."""


@dataclass(slots=True, frozen=True)
class EncoderConfig:
    """Shapes and switches of an encoder."""

    architecture: str
    family: str
    prefix: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    activation: str
    positions: int
    """Rows of the position embedding."""
    first_position: int
    """Position of an input's first token."""
    type_vocab_size: int
    dtype: str
    """The checkpoint's: float32 | float16 | bfloat16."""
    labels: int = 0
    """Numbers that the head gives a sequence; 0: there is no head."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest input."""
        return self.positions - self.first_position

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def encoder_of(raw: Mapping[str, Any]) -> str | None:
    """Return the architecture of an encoder in config.json's fields; None where it is another model."""
    names = raw.get("architectures") or []
    return next((name for name in names if isinstance(name, str) and name in ENCODERS), None)


def read_encoder(raw: Mapping[str, Any]) -> EncoderConfig:
    """Read config.json's fields, of which `encoder_of` is not None. Raises UnsupportedModel."""
    architecture = encoder_of(raw)
    assert architecture is not None
    family = ENCODERS[architecture]
    if (kind := raw.get("model_type")) not in (None, family.name):
        raise UnsupportedModel(
            f"config.json: model_type {kind!r} contradicts the architecture {architecture}, which is "
            f"{family.name!r}"
        )
    fields = {**dict(family.defaults), **{name: value for name, value in raw.items() if value is not None}}
    _refuse(fields)
    hidden, heads = positive(fields, "hidden_size"), positive(fields, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    positions = positive(fields, "max_position_embeddings")
    first = 0
    if family.offset:
        padding = fields["pad_token_id"]
        if isinstance(padding, bool) or not isinstance(padding, int) or not -1 <= padding < positions - 1:
            raise UnsupportedModel(f"config.json: pad_token_id {padding!r} leaves no position for a token")
        first = padding + 1
    dtype = str(fields.get("dtype", fields.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"config.json: dtype {dtype!r} is not supported; {', '.join(_DTYPES)} are")
    return EncoderConfig(
        architecture=architecture,
        family=family.name,
        prefix=family.prefix,
        vocab_size=positive(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(fields, "intermediate_size"),
        num_layers=positive(fields, "num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        layer_norm_eps=positive_number(fields["layer_norm_eps"], "layer_norm_eps"),
        activation=str(fields.get("hidden_act", "gelu")),
        positions=positions,
        first_position=first,
        type_vocab_size=positive(fields, "type_vocab_size"),
        dtype=dtype,
        labels=_labels(fields) if family.classifies else 0,
    )


def _refuse(fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for what changes the computation and is not read."""
    if (activation := fields.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: hidden_act {activation!r} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    if (kind := fields.get("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"config.json: position_embedding_type {kind!r} is not supported; absolute is")
    for name in ("is_decoder", "add_cross_attention"):
        if flag(fields, name):
            raise UnsupportedModel(f"config.json: {name} is true; encoders are supported without it")
    if fields.get("quantization_config"):
        raise UnsupportedModel("config.json: quantization_config is not supported for encoders")


def _labels(fields: Mapping[str, Any]) -> int:
    names = fields.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    return positive(fields, "num_labels", 2)
