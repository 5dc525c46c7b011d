"""A layer of experts (models/triton_experts.py) by the number of tokens, beside torch.grouped_mm.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_experts.py --json lines.jsonl

Experts of the Qwen3-30B-A3B shape, random routing, bfloat16. Each number is the time of one layer of six in
a CUDA graph, microseconds, the best of five replays. Limit: each expert that a token picked read once at the
copy rate, or the arithmetic, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from gpu_models import SHAPES
from gpu_results import result_line
from needs import absent, need

try:
    from leadline.engine.models.triton_experts import experts
    from leadline.engine.models.triton_ops import silu_and_mul
except ModuleNotFoundError as error:
    absent(error)

SHAPE = "Qwen3-30B-A3B"
COUNT, TOP = SHAPES[SHAPE]["num_experts"], SHAPES[SHAPE]["num_experts_per_tok"]
HIDDEN, INNER = SHAPES[SHAPE]["hidden_size"], SHAPES[SHAPE]["moe_intermediate_size"]
COPY_RATE, PRODUCTS = 4.28e12, 788e12
"""Bytes and operations a second of one H200."""
LAYERS = 3

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[..., torch.Tensor]


def grouped(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top: int, _: bool
) -> torch.Tensor:
    """The same by torch: sort, two grouped products, back."""
    weights, chosen = F.linear(x, router).float().softmax(-1).topk(top, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().sort(stable=True)
    every = torch.arange(len(router), device=x.device)
    ends = torch.searchsorted(order.values, every, right=True).to(torch.int32)
    inside = F.grouped_mm(x[order.indices // top], gate_up.transpose(1, 2), offs=ends)
    terms = F.grouped_mm(silu_and_mul(inside), down.transpose(1, 2), offs=ends)
    out = torch.empty_like(terms)
    out[order.indices] = terms * weights.flatten()[order.indices, None].to(x.dtype)
    return out.view(len(x), top, -1).sum(1)


def microseconds(way: Way, x: torch.Tensor, layers: list[Layer]) -> float:
    for layer in layers:
        way(x, *layer, TOP, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in 2 * layers:
            way(x, *layer, TOP, True)
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(layers)))
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,4,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--json", type=Path, help="append lines for results.jsonl there")
    options = parser.parse_args()
    need(gpus=1)
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    layers = [
        (normal(COUNT, HIDDEN), normal(COUNT, 2 * INNER, HIDDEN), normal(COUNT, HIDDEN, INNER))
        for _ in range(LAYERS)
    ]
    for tokens in map(int, options.tokens.split(",")):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        picked = [len(F.linear(x, layer[0]).topk(TOP).indices.unique()) for layer in layers]
        read = sum(picked) / LAYERS * 3 * HIDDEN * INNER * 2 / COPY_RATE
        limit = 1e6 * max(read, tokens * TOP * 6 * HIDDEN * INNER / PRODUCTS)
        ours, theirs = microseconds(experts, x, layers), microseconds(grouped, x, layers)
        print(f"{tokens:>6} tokens: ours {ours:.1f}, grouped_mm {theirs:.1f}, limit {limit:.1f}", flush=True)
        if options.json is not None:
            line = result_line(
                f"experts of a layer, {tokens} tokens",
                ours,
                "us",
                model_shape=SHAPE,
                attention="",
                peer=theirs,
                limit_share=limit / ours,
            )
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
