"""The decode kernel given a raw projection, against rotation, cache write and attention in turn."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from leadline.engine.attention.interface import AttentionBatch, AttentionSpec, RawRotation
from leadline.engine.attention.triton_backend import TritonBackend
from leadline.engine.models.ops import rotary_heads

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CONTEXTS = {
    "one": [1],
    "long": [5000],
    "edges": [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025],
    "padding": [0, 300, 0, 1],
    "many": [(37 * i) % 900 + 1 for i in range(200)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"),
    [(16, 8, 128, 64), (32, 8, 128, 16), (9, 3, 64, 256), (4, 2, 32, 64)],
)
def test_a_raw_projection_gives_what_separate_kernels_give(
    heads: int, kv_heads: int, dim: int, size: int, normed: bool, contexts: str, dtype: torch.dtype
) -> None:
    """Rows of the cache that no context covers are NaN; the new key and value land in their slot alone."""
    lens = CONTEXTS[contexts]
    rows, counts = len(lens), [-(-max(context, 1) // size) for context in lens]
    total = sum(counts) + 1
    order = torch.randperm(total - 1, device="cpu") + 1
    tables = torch.zeros((rows, max(counts)), dtype=torch.int32)
    caches = [torch.full((total * size, kv_heads, dim), torch.nan, dtype=dtype) for _ in "kv"]
    slots = torch.full((rows,), -1)
    for row, (context, blocks) in enumerate(zip(lens, order.split(counts) if total > 1 else [], strict=True)):
        tables[row, : len(blocks)] = blocks
        where = (blocks[:, None] * size + torch.arange(size)).flatten()
        for cache in caches:
            cache[where[: max(context - 1, 0)]] = torch.randn(max(context - 1, 0), kv_heads, dim).to(dtype)
        if context:
            slots[row] = where[context - 1]
    caches = [cache.view(total, size, kv_heads, dim).to(CUDA) for cache in caches]
    angles = torch.rand(6000, dim // 2, device=CUDA) * 6.28
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    q_weight, k_weight = torch.randn(2, dim, device=CUDA).to(dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=CUDA).to(dtype)
    lengths = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    positions = (lengths.long() - 1).clamp_(min=0)
    spec = AttentionSpec(
        heads, kv_heads, dim, size, dim**-0.5, dtype, CUDA, max_rows=rows, max_model_len=6000
    )
    backend = TritonBackend(spec)
    batch = AttentionBatch(
        num_rows=rows,
        num_decodes=rows,
        num_tokens=rows,
        cu_q=torch.arange(rows + 1, dtype=torch.int32, device=CUDA),
        context_lens=lengths,
        block_tables=tables.to(CUDA),
        slot_mapping=slots.to(CUDA),
        query_lens_host=[1] * rows,
        context_lens_host=lens,
        max_query_len=1,
        max_context_len=max(lens),
    )
    norms = (q_weight, k_weight, 1e-6) if normed else None
    q, k, v = rotary_heads(
        qkv.clone(), cos[positions].unsqueeze(1), sin[positions].unsqueeze(1), heads, kv_heads, norms
    )
    plain = [cache.clone() for cache in caches]
    backend.begin(batch)
    expected = backend.forward(q, k, v, *plain)

    raw = RawRotation(cos, sin, positions, q_weight, k_weight, 1e-6 if normed else None)
    results = []
    for _ in range(2):
        fused = [cache.clone() for cache in caches]
        backend.begin(batch)
        assert backend.takes_raw(batch, fused[0])
        results.append(backend.forward_raw(qkv, raw, *fused))
    assert torch.equal(*results), "the same step twice gave different bits"
    live = [row for row, context in enumerate(lens) if context]
    found, wanted = results[0][live].double(), expected[live].double()
    assert found.isfinite().all()
    assert (found - wanted).norm() / wanted.norm() < TOLERANCE[dtype]
    for mine, theirs in zip(fused, plain, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()), "another row than the new token's was written"
        change = (mine.nan_to_num() - theirs.nan_to_num()).double()
        assert change.norm() / theirs.nan_to_num().double().norm() < TOLERANCE[dtype]
    assert not backend._arrived.any()
