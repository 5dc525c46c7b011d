"""The decoder's layers for a step of many tokens over several ranks: sums of one half hide behind products of
the other.

    products   qkv A, B | attention | o A | o B | gate-up, down A | gate-up, down B | qkv A ...
    sums                                  | o A |   o B           |      down A     | down B  | ...

A half's norm comes with its sum (`Fabric.add_rms_norm`), so its products wait for that alone. Sums run on a
stream of their own, by few programs, since each SM they take is missing in the products.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from leadline.engine.models.base import AttentionFn, KVWrite
from leadline.engine.models.layers import Linear
from leadline.engine.models.ops import Rotation
from leadline.engine.models.parallel import Fabric, Sum

if TYPE_CHECKING:
    from leadline.engine.models.decoder import Decoder

__all__ = ["Overlap"]

_FEWEST_TOKENS = int(os.environ.get("LEADLINE_TP_OVERLAP_TOKENS") or 2048)
_ROWS = 128
"""Halves are multiples of it, as tiles of large products are."""


class Overlap:
    """Runs steps of at least `min_tokens` tokens that `fabric` has room for."""

    def __init__(self, model: Decoder, fabric: Fabric) -> None:
        self.model, self.fabric = model, fabric
        self.min_tokens = _FEWEST_TOKENS
        self.stream = torch.cuda.Stream(model.device, priority=-1)

    def fits(self, tokens: int) -> bool:
        return tokens >= self.min_tokens and self.fabric.partial(Sum.O, tokens) is not None

    def layers(
        self,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: AttentionFn,
        write: KVWrite | None,
    ) -> torch.Tensor:
        """residual [T, hidden], overwritten → hidden states [T, hidden] after the final norm."""
        model, tokens = self.model, len(residual)
        middle = -(-tokens // (2 * _ROWS)) * _ROWS
        halves = (slice(0, middle), slice(middle, tokens))
        products = torch.cuda.current_stream()
        x = model.ops.rms_norm(residual, model.layers[0].input_norm.weight, model.config.rms_norm_eps)
        ready = [torch.cuda.Event(), torch.cuda.Event()]
        for event in ready:
            event.record(products)

        def put_and_sum(which: Sum, index: int, linear: Linear, y: torch.Tensor, norm: torch.Tensor) -> None:
            nonlocal x
            half = halves[index]
            target = self.fabric.partial(which, tokens)
            assert target is not None
            _product(linear, y, target[half])
            self.stream.wait_stream(products)
            with torch.cuda.stream(self.stream):
                x = self.fabric.add_rms_norm(
                    which, residual, norm, model.config.rms_norm_eps, out=x, part=half
                )
            ready[index].record(self.stream)

        for layer, next_norm in zip(model.layers, model.following_norms, strict=True):
            qkv = x.new_empty((tokens, layer.qkv.weight.shape[0]))
            for event, half in zip(ready, halves, strict=True):
                products.wait_event(event)
                _product(layer.qkv, x[half], qkv[half])
            q, k, v = layer.rotate(qkv, rotation, write)
            attended = attend(layer.index, q, k, v).reshape(tokens, -1)
            for index, half in enumerate(halves):
                put_and_sum(Sum.O, index, layer.o, attended[half], layer.post_norm.weight)
            for index, half in enumerate(halves):
                products.wait_event(ready[index])
                act = model.ops.silu_and_mul(layer.gate_up(x[half]))
                put_and_sum(Sum.DOWN, index, layer.down, act, next_norm.weight)
        for event in ready:
            products.wait_event(event)
        return x


def _product(linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
    if linear.bias is not None:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
    else:
        torch.mm(x, linear.weight.t(), out=out)
