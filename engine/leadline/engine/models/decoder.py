"""The one decoder: families differ in ModelConfig's values only.

    input ids → embedding ─┬─────────── + ─┬──────── + ─ ... ─ norm → hidden states → head → logits
                           └ norm → attn ─┘└ norm → mlp ┘

The residual stream is carried beside the activations, so that each addition and the norm after it are one
operation (`add_rms_norm`). Attention itself is the caller's: `attend(layer, q, k, v)`.

Models whose layers differ from this drawing (norms after attention and MLP, another activation, scaled sums)
go through variants.py; which way a model takes is settled when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from leadline.engine.models.base import AttentionFn, KVWrite, Rotations, SmallSteps
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.experts import Experts
from leadline.engine.models.layers import (
    ColumnLinear,
    Linear,
    Norm,
    Place,
    RowLinear,
    Slot,
    Slots,
    VocabEmbedding,
    VocabHead,
    WholeNorm,
)
from leadline.engine.models.ops import Ops, select_ops
from leadline.engine.models.parallel import SINGLE, Sum, TensorParallel, check_split
from leadline.engine.models.rope import pair_order, query_factors, rope_tables
from leadline.engine.models.variants import is_variant, variant_layers, with_factors

__all__ = ["Decoder"]


class DecoderLayer:
    """Attention and gated MLP, or experts, with their norms; this rank's heads and columns."""

    def __init__(
        self, index: int, config: ModelConfig, place: Place, tp: TensorParallel, ops: Ops, rotation: int
    ) -> None:
        """rotation: its place among the rotations of a step."""
        dim = config.head_dim
        heads, kv_heads = tp.heads(config.num_heads, config.num_kv_heads)

        self.index, self.ops, self.eps = index, ops, config.rms_norm_eps
        self.rope, self.rotation = config.layers[index].rope, rotation
        self.num_heads, self.num_kv_heads, self.head_dim = heads.count, kv_heads.count, dim
        self.names, self.offset = config.names, config.norm_offset
        hidden, names = config.hidden_size, config.names

        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm(hidden, place, offset=config.norm_offset)

        self.before_attention, self.after_attention = (
            norm(names.before_attention),
            norm(names.after_attention),
        )
        self.before_mlp, self.after_mlp = norm(names.before_mlp), norm(names.after_mlp)
        self.qkv = ColumnLinear(
            [
                ("self_attn.q_proj", heads.times(dim)),
                ("self_attn.k_proj", kv_heads.times(dim)),
                ("self_attn.v_proj", kv_heads.times(dim)),
            ],
            hidden,
            place,
            bias=config.attention_bias,
            merged=names.qkv,
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self.whole_norm: WholeNorm | None = None
        """It does the work of the two above, over all heads at once."""
        if config.head_norms == "head":
            self.q_norm, self.k_norm = (Norm(dim, place, offset=config.norm_offset) for _ in range(2))
        elif config.head_norms == "whole":
            self.q_norm, self.k_norm = Norm(heads.times(dim), place), Norm(kv_heads.times(dim), place)
            self.whole_norm = WholeNorm(self.q_norm, self.k_norm, heads, kv_heads, dim, tp, self.eps)
        self.o = RowLinear(hidden, heads.times(dim), place, tp, Sum.O, bias=config.o_bias)
        self.experts: Experts | None = None
        self.activation = ops.silu_and_mul if config.activation == "silu" else ops.gelu_and_mul
        if config.experts is not None and index not in config.experts.dense_layers:
            self.experts = Experts(config.experts, hidden, place, tp, ops)
        size, mlp, self.down_name, merged = config.intermediate_size, "mlp", names.down, names.gate_up
        self.shared_gate: torch.Tensor | None = None
        """[1, hidden]: of the MLP of all tokens beside the experts"""
        if self.experts is not None:
            called, size, merged = self.experts.config.names, self.experts.config.shared_size, None
            mlp, self.down_name = f"{called.shared}", f"{called.shared}.down_proj"
            if called.shared_gate is not None:
                self.shared_gate = place.empty(1, hidden)
        self.has_mlp = size > 0
        """A plain one, or one beside the experts."""
        if self.has_mlp:
            columns = tp.share(size)
            self.gate_up = ColumnLinear(
                [(f"{mlp}.gate_proj", columns), (f"{mlp}.up_proj", columns)],
                hidden,
                place,
                bias=config.mlp_bias,
                merged=merged,
            )
            self.down = RowLinear(hidden, columns, place, tp, Sum.DOWN, bias=config.mlp_bias)

    @property
    def input_norm(self) -> Norm:
        """The one before attention, of a layer that has it."""
        assert self.before_attention is not None
        return self.before_attention

    @property
    def post_norm(self) -> Norm:
        """The one before the MLP, of a layer that has it."""
        assert self.before_mlp is not None
        return self.before_mlp

    def attention(
        self,
        x: torch.Tensor,
        rotations: Rotations,
        attend: AttentionFn,
        write: KVWrite | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The input of `o`: of all tokens, or of `rows` alone."""
        attended = self.attend(self.qkv(x), rotations, attend, write)
        return attended if rows is None else attended.index_select(0, rows)

    def attend(
        self, qkv: torch.Tensor, rotations: Rotations, attend: AttentionFn, write: KVWrite | None
    ) -> torch.Tensor:
        """The merged projection → attended heads, [T, num_heads * head_dim]."""
        return attend(self.index, *self.rotate(qkv, rotations, write)).reshape(len(qkv), -1)

    def rotate(
        self, qkv: torch.Tensor, rotations: Rotations, write: KVWrite | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v heads of the merged projection, normed and rotated; k and v in the cache if told to."""
        norms = target = None
        cos, sin, positions = rotations[self.rotation]
        if self.whole_norm is not None:
            self.whole_norm(qkv)
        elif self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.eps)
        if write is not None:
            target = (*write.caches[self.index], write.slot_mapping)
        return self.ops.rotary_heads(
            qkv, cos, sin, self.num_heads, self.num_kv_heads, norms, target, positions
        )

    def slots(self, prefix: str) -> Slots:
        names = self.names
        for norm, name in (
            (self.before_attention, names.before_attention),
            (self.after_attention, names.after_attention),
            (self.before_mlp, names.before_mlp),
            (self.after_mlp, names.after_mlp),
            (self.q_norm, "self_attn.q_norm"),
            (self.k_norm, "self_attn.k_norm"),
        ):
            if norm is not None:
                yield from norm.slots(f"{prefix}.{name}")
        yield from self.qkv.slots(prefix)
        yield from self.o.slots(f"{prefix}.self_attn.o_proj")
        if self.experts is not None:
            yield from self.experts.slots(prefix)
            if self.shared_gate is not None:
                gate = f"{prefix}.{self.experts.config.names.shared_gate}.weight"
                yield gate, Slot(self.shared_gate, tuple(self.shared_gate.shape))
        if self.has_mlp:
            yield from self.gate_up.slots(prefix)
            yield from self.down.slots(f"{prefix}.{self.down_name}")

    def settle(self) -> None:
        """Call once after loading: weights as checkpoints have them become those that `attention` takes."""
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        for norm in (*norms, self.q_norm, self.k_norm):
            if norm is not None:
                norm.settle()
        order = pair_order(self.rope, self.head_dim)
        if order is None:
            return
        dim, device = self.head_dim, self.qkv.weight.device
        rows = torch.arange(self.qkv.out_features, device=device).view(-1, dim)
        rotated = self.num_heads + self.num_kv_heads
        rows[:rotated] = rows[:rotated][:, torch.tensor(order, device=device)]
        self.qkv.reorder_rows(rows.flatten())
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.weight.copy_(norm.weight.view(-1, dim)[:, torch.tensor(order, device=device)].flatten())

    def named_linears(self, prefix: str) -> Iterator[tuple[str, ColumnLinear | RowLinear]]:
        """Yield each linear with the prefix that `slots` gives it."""
        yield prefix, self.qkv
        yield f"{prefix}.self_attn.o_proj", self.o
        if self.has_mlp:
            yield prefix, self.gate_up
            yield f"{prefix}.{self.down_name}", self.down

    @property
    def linears(self) -> tuple[Linear, ...]:
        attention = self.qkv, self.o
        return (*attention, self.gate_up, self.down) if self.has_mlp else attention

    def finalize(self) -> None:
        for linear in self.linears:
            linear.finalize()


class Decoder:
    """A CausalLM (models/base.py). Constructed with unset weights: `loader.load_model` fills and finalizes
    it.

    Call it under torch.inference_mode(); nothing in it needs autograd.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        max_positions: int | None = None,
        matrices_later: bool = False,
    ) -> None:
        """`max_positions`: rows of the rotary tables; None: as many as the model is good for.
        `matrices_later`: forms.py allocates the linears of the layers and the experts.

        Raises ConfigError when the model cannot be split over `tp.size` ranks.
        """
        check_split(config, tp.size)
        place = Place(dtype, device, matrices_later)
        self.config, self.dtype, self.device, self.tp = config, dtype, device, tp
        self.num_layers = config.num_layers
        heads, kv_heads = tp.heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads = heads.count, kv_heads.count
        self.head_dim = config.head_dim
        self.attention_scale, self.attention_softcap = config.attention_scale, config.attention_softcap
        self.windows = tuple(layer.window for layer in config.layers)
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.ops = select_ops(device)
        self.writes_kv = self.ops.writes_kv
        positions = max_positions or config.max_model_len
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        tables = [rope_tables(rope, config.head_dim, positions, device) for rope in ropes]
        self.rope_tables = [(cos.to(dtype), sin.to(dtype)) for cos, sin in tables]
        """Of each kind of rotation."""
        self.query_factors = query_factors(ropes[0], positions, device)
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, place, tp)
        self.layers = [
            DecoderLayer(index, config, place, tp, self.ops, ropes.index(layer.rope))
            for index, layer in enumerate(config.layers)
        ]
        self.norm = Norm(config.hidden_size, place, offset=config.norm_offset)
        self.variant = is_variant(config)
        # The norm that comes after each layer: the next layer's first one, or the final one.
        firsts = [] if self.variant else [layer.input_norm for layer in self.layers[1:]]
        self.following_norms = [*firsts, self.norm]
        tied = self.embed if config.tie_word_embeddings else None
        self.head = VocabHead(config.vocab_size, config.hidden_size, place, tp, tied)
        scale = config.embedding_scale
        self.embedding_scale = (
            torch.tensor(scale, dtype=dtype).item() if config.rounds_embedding_scale else scale
        )
        self._look_up = self.embed if scale == 1.0 else self._scaled_embedding
        shaped = config.logits_scale != 1.0 or config.logits_softcap is not None
        self._shape: Callable[[torch.Tensor], torch.Tensor] = self._shaped_logits if shaped else _as_they_are
        self.few_rows: SmallSteps | None = None
        """Another way through the layers for small steps; set by `load_model` where the device has one."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: AttentionFn,
        write: KVWrite | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions int64 [T] → hidden states [T, hidden] after the final norm, or those of `rows`
        (int64 [S]) alone: the last layer computes keys and values of every token, and the rest for them."""
        if rows is not None and self.by_fabric(Sum.O, len(input_ids)):
            # A rank may have only some rows of the residual (Fabric.add_rms_norm): not those to select.
            return self.forward(input_ids, positions, attend, write).index_select(0, rows)
        eps, ops = self.config.rms_norm_eps, self.ops
        rotations: Rotations
        if ops.looks_up:
            rotations = [(cos, sin, positions) for cos, sin in self.rope_tables]
        else:
            rotations = [
                (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), None)
                for cos, sin in self.rope_tables
            ]
        if self.query_factors is not None:
            attend = with_factors(attend, self.query_factors[positions])
        residual = self._look_up(input_ids)
        if self.variant:
            return variant_layers(self, residual, rotations, attend, write, rows)
        few = self.few_rows
        if few is not None and write is not None and few.takes(len(input_ids)):
            hidden = few.layers(residual, rotations, attend, write)
            return hidden if rows is None else hidden.index_select(0, rows)
        x = ops.rms_norm(residual, self.layers[0].input_norm.weight, eps)
        for layer, norm in zip(self.layers, self.following_norms, strict=True):
            wanted = rows if layer is self.layers[-1] else None
            x = layer.attention(x, rotations, attend, write, wanted)
            if wanted is not None:
                if not len(wanted):
                    return x.new_empty((0, self.hidden_size))
                residual = residual.index_select(0, wanted)
            x, residual = self.close(layer.o, x, residual, layer.post_norm)
            if layer.experts is not None:
                x, residual = self.join(Sum.DOWN, layer.experts.partial(x), residual, norm.weight)
            else:
                x, residual = self.close(layer.down, ops.silu_and_mul(layer.gate_up(x)), residual, norm)
        return x

    def close(
        self, linear: RowLinear, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of it, residual + linear(x)), over all ranks; the residual is overwritten."""
        if linear.adds(x):
            residual.addmm_(x, linear.weight.t())
            return self.ops.rms_norm(residual, norm.weight, self.config.rms_norm_eps), residual
        return self.join(linear.which, linear.partial(x), residual, norm.weight)

    def join(
        self, which: Sum, term: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the terms over ranks, add the residual, norm: (normed, residual), both overwritten."""
        tp, eps = self.tp, self.config.rms_norm_eps
        if tp.fabric is not None and self.by_fabric(which, len(term)):
            return tp.fabric.add_rms_norm(which, residual, weight, eps), residual
        return self.ops.add_rms_norm(tp.all_reduce(term), residual, weight, eps)

    def by_fabric(self, which: Sum, tokens: int) -> bool:
        """Whether a sum over ranks goes through the fabric."""
        return self.tp.fabric is not None and self.tp.fabric.partial(which, tokens) is not None

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] → [R, vocab] in the model's dtype, gathered over ranks; in `out` if it is given."""
        few = self.few_rows
        if few is not None and self.tp.size == 1 and few.takes(len(hidden)):
            return self._shape(few.logits(hidden, out))
        return self._shape(self.head(hidden, out))

    def _scaled_embedding(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids).mul_(self.embedding_scale)

    def _shaped_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled and capped, in place."""
        logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def slots(self) -> Slots:
        """Every checkpoint tensor this rank needs, by its Hugging Face name; a merged one several times."""
        yield from self.embed.slots("model.embed_tokens")
        for layer in self.layers:
            yield from layer.slots(f"model.layers.{layer.index}")
        yield from self.norm.slots("model.norm")
        yield from self.head.slots("lm_head")

    def settle(self) -> None:
        """Call once after loading, before anything else: see `DecoderLayer.settle`."""
        self.norm.settle()
        for layer in self.layers:
            layer.settle()

    def finalize(self) -> None:
        """Call once after loading: put weights into the layout that runs fastest, layer by layer."""
        for layer in self.layers:
            layer.finalize()
        self.head.finalize()


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits
