"""The one decoder: Llama, Mistral, SmolLM2, Qwen2, Qwen3, SmolLM3, Phi-3, Mixtral and Qwen3-MoE differ
in ModelConfig's switches only.

    input ids → embedding ─┬─────────── + ─┬──────── + ─ ... ─ norm → hidden states → head → logits
                           └ norm → attn ─┘└ norm → mlp ┘

The residual stream is carried beside the activations, so that each addition and the norm after it are one
operation (`add_rms_norm`). Attention itself is the caller's: `attend(layer, q, k, v)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from leadline.engine.models.base import AttentionFn, KVWrite
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.experts import Experts
from leadline.engine.models.interleave import interleaved
from leadline.engine.models.layers import (
    ColumnLinear,
    Linear,
    Norm,
    Place,
    RowLinear,
    Slots,
    VocabEmbedding,
    VocabHead,
)
from leadline.engine.models.ops import Ops, Rotations, select_ops
from leadline.engine.models.parallel import SINGLE, Sum, TensorParallel, check_split
from leadline.engine.models.rope import rope_tables

if TYPE_CHECKING:
    from leadline.engine.models.few_rows import FewRows

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
        self.rotation = rotation
        self.num_heads, self.num_kv_heads = heads.count, kv_heads.count
        self.input_norm = Norm(config.hidden_size, place)
        self.qkv = ColumnLinear(
            [
                ("q_proj", heads.times(dim)),
                ("k_proj", kv_heads.times(dim)),
                ("v_proj", kv_heads.times(dim)),
            ],
            config.hidden_size,
            place,
            bias=config.attention_bias,
            merged="qkv_proj" if config.merged else None,
        )
        self.q_norm, self.k_norm = (Norm(dim, place), Norm(dim, place)) if config.qk_norm else (None, None)
        self.o = RowLinear(config.hidden_size, heads.times(dim), place, tp, Sum.O, bias=config.o_bias)
        self.post_norm = Norm(config.hidden_size, place)
        self.experts: Experts | None = None
        if config.experts is not None and index not in config.experts.dense_layers:
            self.experts = Experts(config.experts, config.hidden_size, place, tp, ops)
        else:
            columns = tp.share(config.intermediate_size)
            self.gate_up = ColumnLinear(
                [("gate_proj", columns), ("up_proj", columns)],
                config.hidden_size,
                place,
                bias=config.mlp_bias,
                merged="gate_up_proj" if config.merged else None,
            )
            self.down = RowLinear(config.hidden_size, columns, place, tp, Sum.DOWN, bias=config.mlp_bias)

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
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.eps)
        if write is not None:
            target = (*write.caches[self.index], write.slot_mapping)
        return self.ops.rotary_heads(
            qkv, cos, sin, self.num_heads, self.num_kv_heads, norms, target, positions
        )

    def slots(self, prefix: str) -> Slots:
        yield from self.input_norm.slots(f"{prefix}.input_layernorm")
        yield from self.qkv.slots(f"{prefix}.self_attn")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.slots(f"{prefix}.self_attn.q_norm")
            yield from self.k_norm.slots(f"{prefix}.self_attn.k_norm")
        yield from self.o.slots(f"{prefix}.self_attn.o_proj")
        yield from self.post_norm.slots(f"{prefix}.post_attention_layernorm")
        if self.experts is not None:
            yield from self.experts.slots(prefix)
            return
        yield from self.gate_up.slots(f"{prefix}.mlp")
        yield from self.down.slots(f"{prefix}.mlp.down_proj")

    def named_linears(self, prefix: str) -> Iterator[tuple[str, ColumnLinear | RowLinear]]:
        """Yield each linear with the prefix that `slots` gives it."""
        yield f"{prefix}.self_attn", self.qkv
        yield f"{prefix}.self_attn.o_proj", self.o
        if self.experts is None:
            yield f"{prefix}.mlp", self.gate_up
            yield f"{prefix}.mlp.down_proj", self.down

    @property
    def linears(self) -> tuple[Linear, ...]:
        attention = self.qkv, self.o
        return attention if self.experts is not None else (*attention, self.gate_up, self.down)

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
        self.attention_scale, self.attention_softcap = config.head_dim**-0.5, None
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
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, place, tp)
        self.layers = [
            DecoderLayer(index, config, place, tp, self.ops, ropes.index(layer.rope))
            for index, layer in enumerate(config.layers)
        ]
        self.norm = Norm(config.hidden_size, place)
        # The norm that comes after each layer: the next layer's first one, or the final one.
        self.following_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        tied = self.embed if config.tie_word_embeddings else None
        self.head = VocabHead(config.vocab_size, config.hidden_size, place, tp, tied)
        self.few_rows: FewRows | None = None
        """Small steps take another way through the layers, where the device has one; set by `finalize`."""

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
        few = self.few_rows
        if few is not None and write is not None and few.takes(len(input_ids)):
            hidden = few.layers(self.embed(input_ids), rotations, attend, write)
            return hidden if rows is None else hidden.index_select(0, rows)
        residual = self.embed(input_ids)
        x = ops.rms_norm(residual, self.layers[0].input_norm.weight, eps)
        done = 0
        if self._interleaves(len(x)):
            x, done = interleaved(self, x, residual, rotations, attend, write), self.num_layers - 1
        for layer, norm in zip(self.layers[done:], self.following_norms[done:], strict=True):
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

    def _interleaves(self, tokens: int) -> bool:
        """Whether sums of a step run beside its products. Sums by copies cannot be captured."""
        least = self.tp.interleave_tokens
        if self.config.experts is not None:
            return False
        if least is None or tokens < max(least, 2) or self.by_fabric(Sum.O, tokens):
            return False
        return self.tp.exchange is None or not torch.cuda.is_current_stream_capturing()

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
            return few.logits(hidden, out)
        return self.head(hidden, out)

    def slots(self) -> Slots:
        """Every checkpoint tensor this rank needs, by its Hugging Face name; a merged one several times."""
        yield from self.embed.slots("model.embed_tokens")
        for layer in self.layers:
            yield from layer.slots(f"model.layers.{layer.index}")
        yield from self.norm.slots("model.norm")
        yield from self.head.slots("lm_head")

    def finalize(self) -> None:
        """Call once after loading: put weights into the layout that runs fastest, layer by layer."""
        for layer in self.layers:
            layer.finalize()
        self.head.finalize()
        if self.writes_kv:
            from leadline.engine.models.few_rows import FewRows

            self.few_rows = FewRows.of(self)
