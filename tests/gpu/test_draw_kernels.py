"""The sampling kernels draw exactly what sampling/noise.py and the eager sampler define."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from leadline.engine.sampling.noise import gumbel, row_keys
from leadline.engine.sampling.triton_draw import Drawer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def eager(logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """As Sampler._draw."""
    wide = logits.float()
    scaled = (wide - wide.amax(dim=1, keepdim=True)) / temperature[:, None]
    entries = torch.arange(logits.shape[1], dtype=torch.int32, device=CUDA)
    return gumbel(keys, entries).add_(scaled).argmax(dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (3, 49152), (32, 151936), (200, 12000), (7, 1000)])
def test_kernels_draw_the_tokens_that_the_eager_sampler_draws(
    rows: int, vocab: int, dtype: torch.dtype
) -> None:
    max_slots = rows + 9
    drawer = Drawer(max_slots, vocab, CUDA)
    drawn_apart = 0
    for spread in (0.0, 0.5, 3.0, 20.0):
        logits = (torch.randn(rows, vocab, device=CUDA) * spread).to(dtype)
        slots = torch.randperm(max_slots, device=CUDA)[:rows]
        positions = torch.randint(1, 40000, (rows,), device=CUDA)
        random = (torch.arange(rows, device=CUDA) % 4 != 1).long()
        temperature = torch.rand(max_slots, device=CUDA) * 2 + 1e-3
        temperature[0] = 1e-30
        seed = torch.randint(-(2**62), 2**62, (max_slots,), device=CUDA)
        tokens = torch.full((rows,), -5, device=CUDA)
        last = torch.full((max_slots,), -7, device=CUDA)
        drawer(logits, slots, positions, random, temperature, seed, tokens, last)

        expected = eager(logits, row_keys(seed[slots], positions), temperature[slots])
        greedy = logits.float().argmax(dim=1)
        is_random = random.bool()
        assert torch.equal(tokens[is_random], expected[is_random])
        best = logits.amax(dim=1)
        at = logits.gather(1, tokens[:, None])[:, 0]
        assert torch.equal(at[~is_random], best[~is_random])
        assert (tokens[~is_random] <= greedy[~is_random]).all()
        assert torch.equal(last[slots], tokens)
        assert (last == -7).sum() == max_slots - rows
        drawn_apart += int((tokens != greedy).sum())
    assert drawn_apart > 0


def test_padding_rows_set_no_last_token_and_stay_in_the_vocabulary() -> None:
    drawer = Drawer(4, 1000, CUDA)
    logits = torch.randn(4, 1000, device=CUDA)
    logits[2] = torch.nan
    logits[3] = -torch.inf
    slots = torch.tensor([2, -1, 0, 1], device=CUDA)
    zero, one = torch.zeros(4, dtype=torch.int64, device=CUDA), torch.ones(4, device=CUDA)
    tokens, last = torch.full((4,), -1, device=CUDA), torch.full((4,), -1, device=CUDA)
    drawer(logits, slots, zero, zero, one, zero, tokens, last)
    assert ((tokens >= 0) & (tokens < 1000)).all()
    assert tokens[:2].tolist() == logits[:2].argmax(dim=1).tolist()
    assert last.tolist() == [int(tokens[2]), int(tokens[3]), int(tokens[0]), -1]


def test_frequencies_follow_the_softmax() -> None:
    """40,000 draws over 8 entries at temperature 0.7: chi-square with 7 degrees of freedom, p = 1e-6."""
    rows, count = 200, 200
    drawer = Drawer(rows, 8, CUDA)
    logits = torch.tensor([0.0, 0.3, -1.0, 1.0, 2.0, -0.5, 0.1, 0.9], device=CUDA).repeat(rows, 1)
    slots = torch.arange(rows, device=CUDA)
    temperature = torch.full((rows,), 0.7, device=CUDA)
    one = torch.ones(rows, dtype=torch.int64, device=CUDA)
    tokens, last = torch.zeros(rows, dtype=torch.int64, device=CUDA), torch.zeros_like(one)
    seen = torch.zeros(8, device=CUDA)
    for position in range(count):
        drawer(logits, slots, one * position, one, temperature, slots, tokens, last)
        seen += torch.bincount(tokens, minlength=8)
    expected = torch.softmax(logits[0] / 0.7, dim=0) * rows * count
    assert float(((seen - expected).square() / expected).sum()) < 41.0
