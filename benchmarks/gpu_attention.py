"""Time the attention backends alone on one GPU: decode and prefill cells, CUDA-graph replay, medians.

    PYTHONPATH=engine python3 benchmarks/gpu_attention.py [--backends triton:64,flash_attn:256] [--json FILE]

Decode rows state microseconds a layer and the share of the card's copy rate (every KV byte read once);
prefill rows state TFLOP/s of the causal half. Inputs are fresh random numbers, pages lie in random order,
and the pool is rotated over several slices so that replays do not read from L2. Times include the KV write
and, once a graph (not a layer), the work lists; a graph holds LAYERS layers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

import torch

from gpu_results import result_line
from leadline.engine.attention import AttentionBatch, AttentionSpec, make_backend
from needs import need

SHAPES = {"16/8/128": (16, 8, 128), "32/8/128": (32, 8, 128), "9/3/64": (9, 3, 64)}
DECODES = [(1, 1024), (8, 1024), (32, 512), (32, 1024), (256, 512), (256, 1024)]
PREFILLS = [(1, 4096, 0), (4, 4096, 0), (16, 1024, 0), (1, 2048, 8192), (1, 128, 4096), (8, 128, 2048)]
"""(rows, new tokens, cached tokens before them)"""
LAYERS = 8
COPY_RATE = 4.28e12
"""bytes/s, read + write, of a large device-to-device copy on the H200 here."""
MATRIX_RATE = 788
"""TFLOP/s of an 8192 x 8192 x 8192 bfloat16 product on the same card."""


def build_batch(rows: list[tuple[int, int]], block_size: int) -> tuple[AttentionBatch, int]:
    """rows: (context, query tokens) → the batch and the number of blocks its pool needs."""
    needs = [-(-context // block_size) for context, _ in rows]
    order = list(range(sum(needs)))
    random.Random(0).shuffle(order)
    tables, slots, starts = [], [], [0]
    for (context, count), wanted in zip(rows, needs, strict=True):
        table, order = order[:wanted], order[wanted:]
        tables.append(table + [0] * (max(needs) - wanted))
        slots += [
            table[p // block_size] * block_size + p % block_size for p in range(context - count, context)
        ]
        starts.append(starts[-1] + count)
    counts, contexts = [c for _, c in rows], [c for c, _ in rows]
    int32 = {"dtype": torch.int32, "device": "cuda"}
    batch = AttentionBatch(
        num_rows=len(rows),
        num_decodes=counts.count(1),
        num_tokens=starts[-1],
        cu_q=torch.tensor(starts, **int32),
        context_lens=torch.tensor(contexts, **int32),
        block_tables=torch.tensor(tables, **int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device="cuda"),
        query_lens_host=counts,
        context_lens_host=contexts,
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )
    return batch, sum(needs)


def time_layer(name: str, block_size: int, shape: tuple[int, int, int], rows: list[tuple[int, int]]) -> float:
    """Median seconds of one layer's attention."""
    heads, kv_heads, dim = shape
    batch, blocks = build_batch(rows, block_size)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        scale=dim**-0.5,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        max_rows=256,
        max_model_len=max(context for context, _ in rows),
    )
    backend = make_backend(name, spec)
    size = (LAYERS, 2, blocks, block_size, kv_heads, dim)
    pool = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    q = torch.randn((batch.num_tokens, heads, dim), dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn((2, batch.num_tokens, kv_heads, dim), dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        backend.begin(batch)
        for layer in range(LAYERS):
            backend.forward(q, k, v, pool[layer, 0], pool[layer, 1])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / LAYERS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="triton:64,triton:16,flash_attn:256")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", help="append one JSON line a cell here")
    options = parser.parse_args()
    need(gpus=1)
    lines = []
    for shape in options.shapes.split(","):
        heads, kv_heads, dim = SHAPES[shape]
        for backend in options.backends.split(","):
            name, block_size = backend.split(":")
            texts = []
            for count, context in DECODES:
                cell = f"attention decode {count}x{context}"
                seconds = time_layer(name, int(block_size), SHAPES[shape], [(context, 1)] * count)
                share = count * context * kv_heads * dim * 4 / seconds / COPY_RATE
                texts.append(f"{count}x{context}: {seconds * 1e6:.1f}us {share:.0%}")
                lines.append(
                    result_line(
                        cell, seconds * 1e6, "us", model_shape=shape, attention=backend, limit_share=share
                    )
                )
            for count, new, before in PREFILLS:
                cell = f"attention prefill {count}x{new}@{before}"
                seconds = time_layer(name, int(block_size), SHAPES[shape], [(before + new, new)] * count)
                rate = 4e-12 * count * heads * dim * (new * before + new * (new + 1) / 2) / seconds
                texts.append(f"{count}x{new}@{before}: {seconds * 1e6:.1f}us {rate:.0f}TF")
                lines.append(
                    result_line(
                        cell,
                        rate,
                        "TFLOP/s",
                        model_shape=shape,
                        attention=backend,
                        limit_share=rate / MATRIX_RATE,
                    )
                )
            print(shape, backend, "  ".join(texts), flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
