"""What one decode step of the model costs the GPU alone: captured in a CUDA graph, replayed, median.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_graph_step.py [--backends triton:64] [--profile]

Embedding to logits and their argmax, without sampling and without the host: a bound for what decode graphs
can reach, and with --profile the kernels that the time goes to. The share is of bytes (every weight and
every KV byte once) at the card's copy rate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from needs import need

COPY_RATE = 4.28e12
"""bytes/s, read + write, of a large device-to-device copy on the H200 here."""


def capture(llm: LLM, rows: int, context: int) -> torch.cuda.CUDAGraph:
    """A graph of one decode step for `rows` sequences whose context, the new token included, is `context`."""
    runner, size = llm.core.runner, llm.config.block_size
    need = -(-context // size)
    order = random.Random(0).sample(range(runner.num_blocks), rows * need)
    plan = StepPlan(0)
    for slot in range(rows):
        blocks = order[slot * need : (slot + 1) * need]
        tokens = [7 * (slot + p) % 1000 for p in range(context)]
        plan.entered.append(
            NewSeq(slot, slot, tokens, context, SamplingParams(temperature=0.0), slot, blocks)
        )
        plan.rows.append(StepRow(slot, context - 1, 1, True))
    runner.tables.apply(plan)
    inputs = runner.inputs.build(plan)

    def step() -> torch.Tensor:
        logits = runner.compute(inputs)[1]
        assert logits is not None
        return logits.argmax(dim=1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(tokens, eager):
        raise SystemExit("the replayed step chose other tokens than the eager one")
    return graph


def median_seconds(graph: torch.cuda.CUDAGraph, repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def step_bytes(llm: LLM, rows: int, context: int) -> int:
    """Every weight once, every KV byte once."""
    config, model = llm.core.model_config, llm.core.runner.model
    width = (
        config.head_dim * (config.num_heads + 2 * config.num_kv_heads) + config.num_heads * config.head_dim
    )
    layer = config.hidden_size * (width + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * context
    return (weights + kv) * model.dtype.itemsize


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--backends", type=lambda s: s.split(","), default=["triton:64"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), SHAPES[options.shape], "bfloat16")
        for backend in options.backends:
            name, block_size = backend.split(":")
            llm = LLM(
                str(folder),
                progress=False,
                load_format="dummy",
                attention_backend=name,
                block_size=int(block_size),
                max_model_len=4096,
                num_kv_blocks=256 * 1100 // int(block_size),
                enforce_eager=True,
            )
            for rows, context in ((1, 512), (32, 512), (256, 512), (256, 1024)):
                graph = capture(llm, rows, context)
                seconds = median_seconds(graph)
                share = step_bytes(llm, rows, context) / COPY_RATE / seconds
                rate = rows / seconds
                text = f"{seconds * 1e3:.3f} ms a step, {rate:,.0f} tok/s, {share:.0%} of the limit"
                print(f"{backend} {rows}x{context}: {text}", flush=True)
                if options.json:
                    line = result_line(
                        f"decode step in a graph {rows}x{context}",
                        rate,
                        "output tok/s",
                        model_shape=options.shape,
                        attention=backend,
                        limit_share=share,
                    )
                    with open(options.json, "a") as file:
                        file.write(json.dumps(line) + "\n")
                if options.profile and context == 512:
                    print(kernels(graph), flush=True)


def kernels(graph: torch.cuda.CUDAGraph) -> str:
    """The kernels of one replay by total time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:14]
    return "\n".join(
        f"    {row.self_device_time_total:9.1f} us {row.count:5d} x  {row.key[:90]}" for row in rows
    )


if __name__ == "__main__":
    main()
