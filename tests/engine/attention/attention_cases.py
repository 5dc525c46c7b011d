"""Ragged attention steps with a known answer, shared by the CPU test of the torch backend and the GPU tests.

A case is one step over a paged pool in which every cache row that the step must not read is NaN: rows past
each context, blocks without an owner, and the rows this step's own keys go to until the backend has written
them. The expected output is a plain softmax over each row's own history in float64 and never looks at pool,
tables or slots.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from leadline.engine.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec

__all__ = ["EDGES", "SHAPES", "TOLERANCE", "AttentionCase", "fuzz_rows", "make_case", "worst_error"]

SHAPES = {"16/8/128": (16, 8, 128), "32/8/128": (32, 8, 128), "9/3/64": (9, 3, 64)}
"""query heads, KV heads, head_dim"""

EDGES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025)
"""Lengths around tiles, blocks and chunks."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2.5e-3, torch.bfloat16: 1.2e-2}
"""Largest ‖out - expected‖ / ‖expected‖ of any single (token, head). Probabilities and outputs are rounded
to the dtype: 2**-11 for float16 and 2**-8 for bfloat16, a few times over."""


@dataclass(slots=True)
class AttentionCase:
    spec: AttentionSpec
    batch: AttentionBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    expected: torch.Tensor
    """float64 [tokens, heads, dim]"""
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    """Of each row: its keys and values, [context, KV heads, dim]"""
    window: int | None = None

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """One step from the untouched pool."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        backend.begin(self.batch)
        return backend.forward(self.q, self.k, self.v, k_cache, v_cache, self.window)

    def changed(
        self, *, window: int | None = None, softcap: float | None = None, unseen: float = torch.nan
    ) -> AttentionCase:
        """The same step of a layer with a window, of a model that has layers without one too; of a model that
        caps its logits. Keys and values that no query of the step sees are `unseen`: no two rows may share a
        block."""
        spec = replace(self.spec, windows=(None, window, 7), softcap=softcap)
        starts, tables, size = self.batch.cu_q.tolist(), self.batch.block_tables, spec.block_size
        expected, caches = [], (self.k_cache.clone(), self.v_cache.clone())
        reach = [0 if window is None else max(0, length - count + 1 - window) for length, count in self.rows]
        for row, (keys, values) in enumerate(self.histories):
            q = self.q[starts[row] : starts[row + 1]]
            expected.append(_plain_attention(q, keys, values, spec.scale, window, softcap))
            for position in range(reach[row]):
                page = int(tables[row, position // size])
                for cache in caches:
                    cache[page, position % size] = unseen
        return replace(
            self, spec=spec, expected=torch.cat(expected), window=window, k_cache=caches[0], v_cache=caches[1]
        )

    @property
    def rows(self) -> list[tuple[int, int]]:
        return list(zip(self.batch.context_lens_host, self.batch.query_lens_host, strict=True))


def fuzz_rows(seed: int, longest: int = 1025, most_rows: int = 12) -> list[tuple[int, int]]:
    """Random (context, query tokens) rows, decode rows first, lengths mostly from EDGES."""
    rng = random.Random(seed)
    edges = [n for n in EDGES if n <= longest]

    def length() -> int:
        return rng.choice(edges) if rng.random() < 0.8 else rng.randint(1, longest)

    decodes = [(length(), 1) for _ in range(rng.randint(0, most_rows))]
    chunks = []
    for _ in range(rng.randint(0 if decodes else 1, 4)):
        context = length()
        count = rng.choice([context, context, 1 + context // 2, min(context, 17), min(context, 65)])
        if count == 1:
            decodes.append((context, 1))
        else:
            chunks.append((context, count))
    return decodes + chunks


def make_case(
    shape: tuple[int, int, int],
    block_size: int,
    rows: list[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    share_first_block: bool = False,
) -> AttentionCase:
    """rows: (context length, query tokens), rows with one query token first.

    With share_first_block every row uses row 0's first block as its own (an identical prefix); a row
    qualifies if both it and row 0 fill that block, whether or not row 0 fills it in this very step.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype).to(device)

    needs = [-(-context // block_size) for context, _ in rows]
    num_blocks = sum(needs) + 3
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(need)] for need in needs]
    histories = [(draw(context, kv_heads, dim), draw(context, kv_heads, dim)) for context, _ in rows]
    if share_first_block:
        for i, (context, count) in enumerate(rows[1:], 1):
            if rows[0][0] >= block_size and context - count >= block_size:
                tables[i][0] = tables[0][0]
                for mine, first in zip(histories[i], histories[0], strict=True):
                    mine[:block_size] = first[:block_size]

    caches = [torch.full((num_blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=device)]
    caches.append(caches[0].clone())
    slots: list[int] = []
    new: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for i, (context, count) in enumerate(rows):
        where = [tables[i][p // block_size] * block_size + p % block_size for p in range(context)]
        past = context - count
        slots += where[past:]
        shared = block_size if i and tables[i][0] == tables[0][0] else 0  # row 0 brings these
        for cache, history, fresh in zip(caches, histories[i], new, strict=True):
            index = torch.tensor(where[shared:past], dtype=torch.long, device=device)
            cache.view(-1, kv_heads, dim)[index] = history[shared:past]
            fresh.append(history[past:])

    # q, k and v are slices of one buffer, as a merged projection leaves them: their rows are strided.
    k, v = torch.cat(new[0]), torch.cat(new[1])
    tokens = k.shape[0]
    q_width, kv_width = heads * dim, kv_heads * dim
    merged = torch.cat([draw(tokens, q_width), k.reshape(tokens, -1), v.reshape(tokens, -1)], dim=1)
    q = merged[:, :q_width].view(tokens, heads, dim)
    k = merged[:, q_width : q_width + kv_width].view(tokens, kv_heads, dim)
    v = merged[:, q_width + kv_width :].view(tokens, kv_heads, dim)

    counts = [count for _, count in rows]
    contexts = [context for context, _ in rows]
    width = max(needs) + 1
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    int32 = {"dtype": torch.int32, "device": device}
    batch = AttentionBatch(
        num_rows=len(rows),
        num_decodes=counts.count(1),
        num_tokens=tokens,
        cu_q=torch.tensor(starts, **int32),
        context_lens=torch.tensor(contexts, **int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], **int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_lens_host=counts,
        context_lens_host=contexts,
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        scale=dim**-0.5,
        dtype=dtype,
        device=torch.device(device),
        max_rows=max(16, len(rows)),
        max_model_len=width * block_size,
    )
    expected = torch.cat(
        [
            _plain_attention(q[starts[i] : starts[i + 1]], *histories[i], scale=spec.scale)
            for i in range(len(rows))
        ]
    )
    return AttentionCase(spec, batch, q, k, v, caches[0], caches[1], expected, histories)


def worst_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of any (token, head) vector; infinite if anything is not finite."""
    out = out.to(torch.float64)
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [n, heads, dim] at the end of k, v [context, kv_heads, dim]; causal softmax in float64."""
    n, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    q, k, v = (x.to(torch.float64).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    positions = torch.arange(context - n, context, device=q.device)
    keys = torch.arange(context, device=q.device)[None, :]
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)
