"""The torch backend on CPU against a plain softmax: the same cases the GPU backends must pass."""

from __future__ import annotations

import pytest
import torch
from attention_cases import EDGES, SHAPES, TOLERANCE, fuzz_rows, make_case, worst_error

from leadline.engine.attention.torch_backend import TorchBackend


def run_twice(case) -> torch.Tensor:
    backend = TorchBackend(case.spec)
    out = case.run(backend)
    assert torch.equal(out, case.run(backend)), "the same step twice gave different bits"
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_torch_steps_match_a_plain_softmax(shape: str, block_size: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        case = make_case(
            SHAPES[shape], block_size, fuzz_rows(seed, longest=257, most_rows=6), dtype=dtype, seed=seed
        )
        assert worst_error(run_twice(case), case.expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 128])
def test_torch_matches_a_plain_softmax_at_edge_lengths(block_size: int) -> None:
    rows = [(n, 1) for n in EDGES] + [(n + 3, min(n, 65)) for n in EDGES if n > 1]
    case = make_case(SHAPES["9/3/64"], block_size, rows, dtype=torch.float32, seed=1)
    assert worst_error(run_twice(case), case.expected) < TOLERANCE[torch.float32]


def test_a_torch_row_may_read_blocks_that_another_row_fills_in_the_same_step() -> None:
    rows = [(40, 40), (50, 20), (33, 2)]
    case = make_case(SHAPES["9/3/64"], 16, rows, dtype=torch.float32, share_first_block=True)
    assert worst_error(run_twice(case), case.expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 16, 17, 63, 400])
def test_torch_sees_the_window_of_a_layer_alone(window: int, softcap: float | None) -> None:
    """Rows shorter than it, as long, and longer; chunks that begin before it, in it and at position 0."""
    rows = [(n, 1) for n in (1, 15, 16, 17, 64, 300)]
    rows += [(n, count) for n in (16, 18, 70, 300) for count in (2, 15, n)]
    case = make_case(SHAPES["9/3/64"], 16, rows, dtype=torch.float32).changed(window=window, softcap=softcap)
    assert worst_error(run_twice(case), case.expected) < TOLERANCE[torch.float32]


def test_a_window_hides_something_in_the_cases() -> None:
    case = make_case(SHAPES["9/3/64"], 16, [(40, 1), (50, 20)], dtype=torch.float32)
    for change in ({"window": 30}, {"softcap": 1.5}):
        assert worst_error(case.changed(**change).expected, case.expected) > 0.05


def test_the_cases_catch_a_backend_that_ignores_the_block_table() -> None:
    """The check itself can fail: swapping two entries of one row's table must show."""
    case = make_case(SHAPES["9/3/64"], 16, [(70, 1)], dtype=torch.float32)
    case.batch.block_tables[0, [0, 1]] = case.batch.block_tables[0, [1, 2]]
    assert worst_error(case.run(TorchBackend(case.spec)), case.expected) > 0.1


def test_the_cases_catch_a_backend_that_reads_past_the_context() -> None:
    """Rows past the context are NaN: one key too many must show."""
    case = make_case(SHAPES["9/3/64"], 16, [(70, 1)], dtype=torch.float32)
    case.batch.context_lens += 1
    case.batch.context_lens_host[0] += 1
    case.batch.max_context_len += 1
    assert worst_error(case.run(TorchBackend(case.spec)), case.expected) == float("inf")
