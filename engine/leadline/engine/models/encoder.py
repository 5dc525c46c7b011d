"""BERT, RoBERTa and XLM-RoBERTa: every token sees every other token of its input, and nothing is cached.

    ids, positions, types → embeddings → norm ─┬─ attention ─ + ─ norm ─┬─ MLP ─ + ─ norm ─ ... → states
                                               └───────────────┘        └────────┘

Inputs are packed without padding, [T]. Attention itself is the caller's: `attend(layer, q, k, v)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from leadline.engine.models.base import AttentionFn
from leadline.engine.models.encoder_config import EncoderConfig
from leadline.engine.models.layers import Linear, Place, Slot, Slots

__all__ = ["Encoder"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class _Norm:
    """A LayerNorm."""

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight, self.bias, self.eps = place.empty(size), place.empty(size), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def slots(self, prefix: str) -> Slots:
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            yield f"{prefix}.{name}", Slot(tensor, tuple(tensor.shape))


def _linear(inputs: int, outputs: int, place: Place) -> Linear:
    return Linear(place.empty(outputs, inputs), place.empty(outputs))


def _slots_of(linear: Linear, prefix: str, part: int = 0, parts: int = 1) -> Slots:
    """The weight and bias of one checkpoint projection; of several merged ones the `part`-th."""
    rows = linear.weight.shape[0] // parts
    assert linear.bias is not None
    for name, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        target = tensor[part * rows : (part + 1) * rows]
        yield f"{prefix}.{name}", Slot(target, tuple(target.shape))


class _Layer:
    def __init__(self, config: EncoderConfig, place: Place) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.qkv = _linear(hidden, 3 * hidden, place)
        self.out = _linear(hidden, hidden, place)
        self.attention_norm = _Norm(hidden, config.layer_norm_eps, place)
        self.up, self.down = _linear(hidden, inner, place), _linear(inner, hidden, place)
        self.output_norm = _Norm(hidden, config.layer_norm_eps, place)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.up, self.down

    def slots(self, prefix: str) -> Slots:
        for part, name in enumerate(("query", "key", "value")):
            yield from _slots_of(self.qkv, f"{prefix}.attention.self.{name}", part, 3)
        yield from _slots_of(self.out, f"{prefix}.attention.output.dense")
        yield from self.attention_norm.slots(f"{prefix}.attention.output.LayerNorm")
        yield from _slots_of(self.up, f"{prefix}.intermediate.dense")
        yield from _slots_of(self.down, f"{prefix}.output.dense")
        yield from self.output_norm.slots(f"{prefix}.output.LayerNorm")


class Encoder:
    """Constructed with unset weights: `loader.load_encoder` fills and finalizes it. Call it under
    torch.inference_mode()."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        place = Place(dtype, device)
        hidden = config.hidden_size
        self.config, self.dtype, self.device = config, dtype, device
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.words = place.empty(config.vocab_size, hidden)
        self.positions = place.empty(config.positions, hidden)
        self.types = place.empty(config.type_vocab_size, hidden)
        self.norm = _Norm(hidden, config.layer_norm_eps, place)
        self.layers = [_Layer(config, place) for _ in range(config.num_layers)]
        self.activation = _ACTIVATIONS[config.activation]
        self.dense = self.head = None
        if config.labels:
            self.dense = _linear(hidden, hidden, place)
            self.head = _linear(hidden, config.labels, place)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        attend: AttentionFn,
    ) -> torch.Tensor:
        """input_ids, positions (from 0 in each input), types int64 [T] → hidden states [T, hidden]. `types`:
        which text of a pair a token belongs to; None: the first."""
        x = F.embedding(input_ids, self.words)
        x = x + F.embedding(positions + self.config.first_position, self.positions)
        # RoBERTa has one type only, also for pairs.
        single = types is None or self.config.type_vocab_size == 1
        x = self.norm(x + (self.types[0] if single else F.embedding(types, self.types)))
        for index, layer in enumerate(self.layers):
            heads = layer.qkv(x).view(len(x), 3, self.num_heads, self.head_dim)
            attended = attend(index, *heads.unbind(1)).reshape(len(x), -1)
            x = layer.attention_norm(x + layer.out(attended))
            x = layer.output_norm(x + layer.down(self.activation(layer.up(x))))
        return x

    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """Hidden states of each input's first token [n, hidden] → logits [n, labels]."""
        assert self.dense is not None
        assert self.head is not None
        return self.head(torch.tanh(self.dense(first)))

    def slots(self) -> Slots:
        """Every checkpoint tensor, by its Hugging Face name without the prefix of a model with a head."""
        for name, table in (
            ("word_embeddings", self.words),
            ("position_embeddings", self.positions),
            ("token_type_embeddings", self.types),
        ):
            yield f"embeddings.{name}.weight", Slot(table, tuple(table.shape))
        yield from self.norm.slots("embeddings.LayerNorm")
        for index, layer in enumerate(self.layers):
            yield from layer.slots(f"encoder.layer.{index}")
        if self.dense is not None and self.head is not None:
            bert = self.config.family == "bert"
            yield from _slots_of(self.dense, "pooler.dense" if bert else "classifier.dense")
            yield from _slots_of(self.head, "classifier" if bert else "classifier.out_proj")

    def finalize(self) -> None:
        """Call once after loading: put weights into the layout that runs fastest."""
        for linear in self._linears():
            linear.finalize()

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from layer.linears
        if self.dense is not None and self.head is not None:
            yield from (self.dense, self.head)
