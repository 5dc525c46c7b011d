"""Many tokens over several ranks: a half's sums over ranks travel while the other half is computed.

    A   qkv |           | o ~~sum~~ | norm, gate, up, down ~~~~~~~~~sum~~~~~~~~~ | norm, qkv
            | attention |           |                                            |
    B   qkv |           |     o ~~~~~~~~~~sum~~~~~~~~ | norm, gate, up, down ~~~~~~~~sum~~~~~~ | norm, qkv

Attention sees all tokens at once, and each element is summed as ever: results change by nothing but how
products of fewer rows round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from leadline.engine.models.base import AttentionFn, KVWrite
from leadline.engine.models.layers import Linear, Norm, RowLinear
from leadline.engine.models.ops import Rotations

if TYPE_CHECKING:
    from leadline.engine.models.decoder import Decoder

__all__ = ["interleaved"]

_Begin = Callable[[RowLinear, torch.Tensor, int], Any]
"""Start the sum of a product, for half 0 or 1 → what `_End` takes."""
_End = Callable[[Any, torch.Tensor, Norm], torch.Tensor]
"""The sum added to the half's residual, normed."""


def interleaved(
    model: Decoder,
    x: torch.Tensor,
    residual: torch.Tensor,
    rotations: Rotations,
    attend: AttentionFn,
    write: KVWrite | None,
) -> torch.Tensor:
    """All layers but the last one. x [T, hidden], normed for the first layer; residual [T, hidden],
    overwritten → x for the last layer. Needs `tp.exchange` or `tp.start_sum`."""
    ops = model.ops
    begin, end = _by_copies(model) if model.tp.exchange is not None else _by_collectives(model)

    xs, residuals = list(x.tensor_split(2)), residual.tensor_split(2)
    sums: list[Any] = []
    for layer in model.layers[:-1]:
        qkv = x.new_empty((len(x), layer.qkv.out_features))
        for i, part in enumerate(qkv.tensor_split(2)):
            if sums:
                xs[i] = end(sums[i], residuals[i], layer.input_norm)
            layer.qkv.into(xs[i], part)
        attended = layer.attend(qkv, rotations, attend, write)
        sums = [begin(layer.o, part, i) for i, part in enumerate(attended.tensor_split(2))]
        for i, part in enumerate(residuals):
            hidden = end(sums[i], part, layer.post_norm)
            sums[i] = begin(layer.down, ops.silu_and_mul(layer.gate_up(hidden)), i)
    norm = model.layers[-1].input_norm
    return torch.cat([end(*pair, norm) for pair in zip(sums, residuals, strict=True)]) if sums else x


def _by_copies(model: Decoder) -> tuple[_Begin, _End]:
    exchange, eps = model.tp.exchange, model.config.rms_norm_eps
    assert exchange is not None

    def begin(linear: RowLinear, y: torch.Tensor, half: int) -> Any:
        return exchange.start(linear.which, half, Linear.__call__(linear, y))

    def end(sent: Any, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        return exchange.add_rms_norm(sent, part, norm.weight, eps)

    return begin, end


def _by_collectives(model: Decoder) -> tuple[_Begin, _End]:
    start, eps = model.tp.start_sum, model.config.rms_norm_eps
    assert start is not None

    def begin(linear: RowLinear, y: torch.Tensor, half: int) -> Any:
        terms = Linear.__call__(linear, y)
        return terms, start(terms)

    def end(sums: Any, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        total, wait = sums
        wait()
        return model.ops.add_rms_norm(total, part, norm.weight, eps)[0]

    return begin, end
