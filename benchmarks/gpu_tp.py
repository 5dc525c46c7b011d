"""Tensor parallelism on the GPUs of one host: agreement with one GPU, the workloads, and the scaling.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_tp.py --tp 1,2 --shape Qwen3-8B --json results.jsonl
    PYTHONPATH=protocol:engine python3 benchmarks/gpu_tp.py --tp 1,2 --workloads= --agreement

Workloads and their rules are those of gpu_engine.py. Each size is a new engine; ratios are to the first size
of the same run. `--agreement` writes one checkpoint of random weights, so that all sizes have the same ones,
and compares greedy runs as gpu_engine.py does; otherwise each rank draws its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_engine import LIMITS, PEERS, agrees, compare, greedy_runs, measure, time_to_first_token
from gpu_models import SHAPES, write_model, write_weights
from gpu_phases import phases
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from needs import need

TP_LIMITS = {("Qwen3-8B", 2): {"A": 25_000}}
TP_PEERS = {("Qwen3-8B", 2): {"A": 10_350}}
"""nano-vllm, measured in an earlier session."""


def make_llm(options: argparse.Namespace, folder: Path, size: int) -> LLM:
    began = time.perf_counter()
    llm = LLM(
        str(folder),
        progress=False,
        load_format="auto" if options.agreement else "dummy",
        dtype=options.dtype,
        attention_backend="triton",
        block_size=64,
        tensor_parallel=size,
        enforce_eager=options.eager,
        gpu_memory_utilization=options.memory,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=8192 if options.shape != "tiny" else 4096,
    )
    seconds = time.perf_counter() - began
    runner = llm.core.runner
    fabric = size > 1 and runner.group.fabric is not None
    report = (runner.runner if size > 1 else runner).graph_report
    print(
        f"TP {size}: ready in {seconds:.1f} s, {llm.core.num_kv_blocks} blocks, fabric {fabric}, {report}",
        flush=True,
    )
    return llm


def run_workloads(
    options: argparse.Namespace, llm: LLM, size: int, first: dict[str, float]
) -> list[dict[str, Any]]:
    lines = []
    shape = options.shape
    for name in options.workloads:
        if name in ("cold", "warm"):
            workload, unit = f"TTFT {name}", "ms"
            value = time_to_first_token(llm, name == "warm")
        else:
            workload, unit = name, "output tok/s"
            if name.startswith("bs"):
                measure(llm, name, options.requests, options.longest)
            seconds, _, output = measure(llm, name, options.requests, options.longest)
            value = output / seconds
        first.setdefault(workload, value)
        scaling = first[workload] / value if unit == "ms" else value / first[workload]
        limits, peers = (LIMITS, PEERS) if size == 1 else (TP_LIMITS, TP_PEERS)
        key = shape if size == 1 else (shape, size)
        limit = limits.get(key, {}).get(workload)
        print(f"{shape} TP {size} {workload}: {value:,.2f} {unit}, {scaling:.2f}x the first size", flush=True)
        lines.append(
            result_line(
                workload,
                value,
                unit,
                model_shape=shape,
                attention="triton:64",
                peer=peers.get(key, {}).get(workload),
                limit_share=None if limit is None else limit / value if unit == "ms" else value / limit,
                gpus=size,
                mode="eager" if options.eager else "graph",
                scaling=round(scaling, 3),
            )
        )
    return lines


def profile(llm: LLM, rows: int, steps: int = 30) -> None:
    """GPU kernels of rank 0 by total time, over decode steps of `rows` sequences."""
    from torch.profiler import ProfilerActivity, profile

    prompts = [[(31 * i + j) % 10000 for j in range(512)] for i in range(rows)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps)
    llm.generate(prompts, params, use_tqdm=False)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
    print(f"kernels of {steps} steps of {rows} rows, prefixes cached")
    table = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:16]
    for row in table:
        print(f"    {row.self_device_time_total:9.0f} us {row.count:6d} x  {row.key[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", type=names, default=["bs1", "bs32", "cold", "warm", "A"])
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--phases", action="store_true", help="host time of a step by phase")
    parser.add_argument(
        "--profile", type=names, default=[], help="kernels by time, for these numbers of rows"
    )
    parser.add_argument("--timeout", type=int, default=500, help="seconds after which all stacks are printed")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=max(options.tp))
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    first: dict[str, float] = {}
    reference, failed = None, 0
    with tempfile.TemporaryDirectory() as temporary:
        shape = SHAPES[options.shape]
        folder = write_model(Path(temporary), shape, options.dtype)
        if options.agreement:
            write_weights(folder, shape, options.dtype)
        for size in options.tp:
            llm = make_llm(options, folder, size)
            if options.agreement:
                runs = greedy_runs(llm, shape["vocab_size"])
                reference = reference or runs
                found = compare(reference, runs)
                failed += not agrees(found)
                verdict = "agrees" if agrees(found) else "DISAGREES"
                print(f"TP {size} against TP {options.tp[0]}: {verdict} {found}", flush=True)
            lines = run_workloads(options, llm, size, first)
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
            if options.phases:
                for rows in (1, 32, 256):
                    print(f"TP {size} {phases(llm, rows)}", flush=True)
            for rows in options.profile if size == options.tp[-1] else []:
                profile(llm, int(rows))
            llm.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
