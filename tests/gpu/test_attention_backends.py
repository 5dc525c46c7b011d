"""Every attention backend on a CUDA device, against a plain float64 softmax: `pytest -m gpu tests/gpu`.

With TRITON_INTERPRET=1 the Triton part runs on a machine without a GPU (slowly, and in float16: the
interpreter multiplies bfloat16 wrongly).
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from attention_cases import EDGES, SHAPES, TOLERANCE, AttentionCase, fuzz_rows, make_case, worst_error

from leadline.engine.attention.interface import AttentionBackend, AttentionSpec
from leadline.engine.errors import ConfigError

pytestmark = pytest.mark.gpu

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
LONGEST = 130 if INTERPRET else 1025
SEEDS = range(1) if INTERPRET else range(6)
DTYPES = ["float16"] if INTERPRET else ["float16", "bfloat16"]
PAGED = [("torch", 16), ("torch", 256), ("flash_attn", 256), *(("triton", n) for n in (16, 32, 64, 128, 256))]
CASES = [(name, size) for name, size in PAGED if not INTERPRET or name == "triton"]
GRAPHED = [("flash_attn", 256), ("triton", 64), ("triton", 16)]


def build(name: str, spec: AttentionSpec) -> AttentionBackend:
    if name == "torch":
        from leadline.engine.attention.torch_backend import TorchBackend

        return TorchBackend(spec)
    if name == "flash_attn":
        from leadline.engine.attention.flash_backend import FlashBackend

        return FlashBackend(spec)
    from leadline.engine.attention.triton_backend import TritonBackend

    return TritonBackend(spec)


def check(name: str, case: AttentionCase) -> None:
    backend = build(name, case.spec)
    out = case.run(backend)
    assert out.dtype == case.spec.dtype
    assert worst_error(out, case.expected) < TOLERANCE[case.spec.dtype]
    assert torch.equal(out, case.run(backend)), "the same step twice gave different bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "block_size"), CASES)
def test_ragged_steps_match_a_plain_softmax(name: str, block_size: int, shape: str, dtype: str) -> None:
    for seed in SEEDS:
        case = make_case(
            SHAPES[shape],
            block_size,
            fuzz_rows(seed, LONGEST),
            dtype=getattr(torch, dtype),
            device=DEVICE,
            seed=seed,
        )
        check(name, case)


@pytest.mark.parametrize(("name", "block_size"), CASES)
@pytest.mark.parametrize("kind", ["one", "decode", "prompt", "suffix"])
def test_edge_lengths_match_a_plain_softmax(name: str, block_size: int, kind: str) -> None:
    lengths = [n for n in EDGES if n <= LONGEST]
    rows = {
        "one": [(lengths[-1], 1)],
        "decode": [(n, 1) for n in lengths],
        "prompt": [(n, n) for n in lengths if n > 1],
        "suffix": [(n + 2, 1 + n // 2) for n in lengths if n > 1],
    }[kind]
    dtype = getattr(torch, DTYPES[-1])
    check(name, make_case(SHAPES["16/8/128"], block_size, rows, dtype=dtype, device=DEVICE, seed=5))


@pytest.mark.parametrize(("name", "block_size"), CASES)
def test_a_row_may_read_blocks_that_another_row_fills_in_the_same_step(name: str, block_size: int) -> None:
    rows = [(block_size + 40, 1), (block_size + 70, 1), (block_size + 3, 2), (2 * block_size + 5, 33)]
    fresh = [(block_size + 40, block_size + 40), (block_size + 70, 64), (2 * block_size + 5, 3)]
    for case_rows in (rows, fresh):
        case = make_case(
            SHAPES["9/3/64"],
            block_size,
            case_rows,
            dtype=torch.float16,
            device=DEVICE,
            seed=9,
            share_first_block=True,
        )
        check(name, case)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_short_chunks_after_long_prefixes_split_their_keys(shape: str, block_size: int) -> None:
    batches = [[(700, 20)]] if INTERPRET else [[(4224, 128)], [(2100, 3)], [(3000, 65), (600, 1), (2500, 64)]]
    for seed, rows in enumerate(batches):
        ordered = sorted(rows, key=lambda row: row[1] > 1)
        dtype = getattr(torch, DTYPES[-1])
        case = make_case(SHAPES[shape], block_size, ordered, dtype=dtype, device=DEVICE, seed=seed)
        backend = build("triton", case.spec)
        out = case.run(backend)
        assert backend._prefill_splits > 1
        assert worst_error(out, case.expected) < TOLERANCE[dtype]
        assert torch.equal(out, case.run(backend)), "the same step twice gave different bits"
        assert not backend._prefill_arrived.any()


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize(("name", "block_size"), CASES)
def test_layers_with_a_window_and_capped_logits(
    name: str, block_size: int, window: int | None, softcap: float | None
) -> None:
    """Rows and chunks around the window; a chunk of many tokens, whose queries share no key."""
    lengths = [1, 50, 65, 130] if INTERPRET else [1, 16, 49, 50, 51, 64, 65, 100, 128, 129, 130, 500, 1025]
    rows = [(n, 1) for n in lengths] + [(n, count) for n in lengths[1:] for count in (3, n)]
    dtype = getattr(torch, DTYPES[-1])
    case = make_case(SHAPES["16/8/128"], block_size, rows, dtype=dtype, device=DEVICE, seed=7)
    # flash-attn multiplies what lies before the window in a tile by 0: finite values alone have no effect.
    unseen = 1000.0 if name == "flash_attn" else torch.nan
    check(name, case.changed(window=window, softcap=softcap, unseen=unseen))


@pytest.mark.parametrize("shape", [(8, 4, 256), (4, 1, 256)])
def test_triton_takes_the_heads_of_gemma_with_a_window(shape: tuple[int, int, int]) -> None:
    rows = [(5, 1), (100, 1), (129, 1), (130, 1), (40, 40), (129, 60), (130, 3)]
    case = make_case(shape, 64, rows, dtype=torch.float16, device=DEVICE, seed=8)
    for softcap in (None, 1.5):
        check("triton", case.changed(window=50, softcap=softcap))


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_window_of_a_short_chunk_after_a_long_prefix_splits_its_keys(block_size: int) -> None:
    context, window = (700, 600) if INTERPRET else (4224, 3000)
    dtype = getattr(torch, DTYPES[-1])
    case = make_case(SHAPES["16/8/128"], block_size, [(context, 20)], dtype=dtype, device=DEVICE, seed=2)
    case = case.changed(window=window)
    backend = build("triton", case.spec)
    assert worst_error(case.run(backend), case.expected) < TOLERANCE[dtype]
    assert backend._prefill_splits > 1
    assert not backend._prefill_arrived.any()


@pytest.mark.parametrize(
    "rows", [[(3000, 1024)], [(5000, 1), (9000, 2048), (300, 300)], [(700, 1), (8200, 8192)]]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_chunk_after_a_prefix_goes_through_fa3_where_it_is_installed(
    shape: str, rows: list[tuple[int, int]]
) -> None:
    case = make_case(SHAPES[shape], 64, rows, dtype=torch.bfloat16, device=DEVICE, seed=11)
    backend = build("triton", case.spec)
    out = case.run(backend)
    assert backend._fa3.takes_prefix == backend._fa3.available
    assert worst_error(out, case.expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 64), (8, 8, 128), (6, 2, 80), (4, 2, 96)])
def test_triton_takes_other_group_sizes_and_head_dims(heads: int, kv_heads: int, dim: int) -> None:
    check(
        "triton",
        make_case((heads, kv_heads, dim), 64, fuzz_rows(3, LONGEST), dtype=torch.float16, device=DEVICE),
    )


def test_triton_in_float32_is_not_rounded_to_tf32() -> None:
    check(
        "triton", make_case(SHAPES["16/8/128"], 32, fuzz_rows(4, LONGEST), dtype=torch.float32, device=DEVICE)
    )


@pytest.mark.parametrize(("name", "block_size"), [] if INTERPRET else GRAPHED)
def test_a_captured_decode_graph_is_right_for_other_lengths(name: str, block_size: int) -> None:
    """Capture one step of 12 rows, then replay it for batches of other lengths and of fewer rows."""
    rows, width = 12, 1100 // block_size + 2
    live = [
        [(1 + (331 * (i + 1) * (step + 1)) % 1025, 1) for i in range(n)]
        for step, n in enumerate((12, 12, 5, 1))
    ]
    live.append([(1025, 1)] * 12)
    cases = [
        make_case(SHAPES["16/8/128"], block_size, r, dtype=torch.bfloat16, device=DEVICE, seed=i)
        for i, r in enumerate(live)
    ]
    blocks = max(case.k_cache.shape[0] for case in cases)
    shape = (blocks, block_size, *cases[0].k_cache.shape[2:])
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    q, k, v = (
        torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=DEVICE)
        for x in (cases[0].q, cases[0].k, cases[0].v)
    )
    batch = dataclasses.replace(
        cases[0].batch,
        context_lens=torch.ones(rows, dtype=torch.int32, device=DEVICE),
        block_tables=torch.zeros((rows, width), dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
        context_lens_host=[1100] * rows,
        max_context_len=1100,
    )
    backend = build(name, dataclasses.replace(cases[0].spec, max_model_len=width * block_size))

    def step() -> torch.Tensor:
        backend.begin(batch)
        return backend.forward(q, k, v, k_cache, v_cache)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    for case in cases:
        n = case.batch.num_rows
        for static, new, padding in (
            (q, case.q, 0),
            (k, case.k, 0),
            (v, case.v, 0),
            (batch.context_lens, case.batch.context_lens, 1),
            (batch.slot_mapping, case.batch.slot_mapping, -1),
        ):
            static.fill_(padding)
            static[:n] = new
        batch.block_tables.zero_()
        batch.block_tables[:n, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        k_cache[: case.k_cache.shape[0]] = case.k_cache
        v_cache[: case.v_cache.shape[0]] = case.v_cache
        graph.replay()
        assert worst_error(out[:n], case.expected) < TOLERANCE[torch.bfloat16]


def test_triton_gives_zero_for_a_padding_row_with_no_context() -> None:
    case = make_case(SHAPES["16/8/128"], 64, [(70, 1), (5, 1)], dtype=torch.float16, device=DEVICE)
    case.batch.context_lens[1] = 0
    case.batch.slot_mapping[1] = -1
    out = case.run(build("triton", case.spec))
    assert worst_error(out[:1], case.expected[:1]) < TOLERANCE[torch.float16]
    assert not out[1].any()


@pytest.mark.skipif(INTERPRET, reason="flash-attn runs on CUDA only")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 64}, "block_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 300}, "head_dim"),
    ],
)
def test_flash_attn_names_the_setting_it_cannot_take(change: dict[str, object], named: str) -> None:
    case = make_case(SHAPES["16/8/128"], 256, [(3, 3)], dtype=torch.float16, device=DEVICE)
    with pytest.raises(ConfigError, match=named):
        build("flash_attn", dataclasses.replace(case.spec, **change))
