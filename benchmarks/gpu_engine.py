"""The whole engine on one GPU with random weights: agreement of the attention backends, and the workloads
of docs/benchmarks.md, eager and with CUDA graphs in one run.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_engine.py --backends triton:64 --json results.jsonl
    PYTHONPATH=protocol:engine python3 benchmarks/gpu_engine.py --shape tiny --workloads A --requests 8
    --backends torch:64 --modes eager

A backend is NAME:BLOCK_SIZE. A mode is `eager` or `graph`. --quantized w4a16 (or awq, fp8-block, ...) draws
the weights in that form; there is no peer and no limit then.

1. Agreement: the same greedy requests on each backend; wherever two runs have the same history, the
   log-probability they report for the same token must agree within WORST_NATS, and they may part only
   where the two best tokens are that close (a tie in bfloat16). The first backend named is the reference.
2. Workload A: 256 requests, prompts and outputs of U(100, 1024) tokens, all at once, temperature 0.6
   (142,827 prompt and 133,966 output tokens). bs1 and bs32: 128 tokens in, 256 out.
   --peer runs nano-vllm (gpu_nano.py) on the same workloads first, on the same GPU, and ends with one table:
   peer, ours, ratio to the better of it and the peers of an earlier session, share of the limit, target.
3. TTFT: a prompt of 4,224 tokens alone, one output token; cold, and warm with 4,096 of them cached. p50 of 9.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_models import QUANTIZED, SHAPES, write_model
from gpu_phases import phases, timed_run
from gpu_results import result_line
from gpu_workloads import workload
from leadline.engine import LLM, SamplingParams
from needs import need

LIMITS = {
    "Qwen3-0.6B": {"A": 36_000, "bs1": 3_590, "bs32": 64_000, "TTFT cold": 5},
    "Qwen3-8B": {"A": 12_600, "bs1": 283, "bs32": 8_400, "TTFT cold": 85, "TTFT warm": 7},
}
"""tok/s no engine can pass on one H200: every weight once a step, every KV byte once, no overlap; ms of
TTFT."""
PEERS = {
    "Qwen3-0.6B": {"A": 20_200, "bs1": 421, "bs32": 13_900, "TTFT cold": 31.0, "TTFT warm": 14.8},
    "Qwen3-8B": {"A": 9_400, "bs1": 191, "bs32": 5_200, "TTFT cold": 108.1, "TTFT warm": 14.2},
}
"""The better of nano-vllm bb823b3 and vLLM 0.26.0, measured on an H200 in an earlier session; TARGETS is what
this project set itself then."""
TARGETS = {
    "Qwen3-0.6B": {"A": 30_000, "bs1": 1_500, "bs32": 35_000, "TTFT cold": 12, "TTFT warm": 4},
    "Qwen3-8B": {"A": 11_000, "bs1": 255, "bs32": 7_000, "TTFT cold": 95, "TTFT warm": 9},
}
WORST_NATS, MEAN_NATS = 0.15, 0.02
"""Differences of log-probabilities that count as agreement. Backends differ by 2**-8 relative in each layer's
attention, through 28 layers of bfloat16, and logits themselves are rounded to 2**-6. Scaling attention by
1.1 in 6 layers, as a trial, moved the mean by 0.03."""


def measure(llm: LLM, name: str, requests: int, longest: int) -> tuple[float, int, int]:
    """Seconds, prompt tokens and output tokens of one run to the end, on an empty prefix cache."""
    prompts, lengths = workload(name, requests, longest)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    produced = [len(output.outputs[0].token_ids) for output in outputs]
    if produced != lengths:
        raise SystemExit(f"{name}: asked for {sum(lengths)} output tokens, got {sum(produced)}")
    return seconds, sum(map(len, prompts)), sum(produced)


def greedy_runs(llm: LLM, vocab: int) -> list[Any]:
    """24 greedy requests of ragged lengths with the log-probabilities of the best tokens at each step."""
    rng = random.Random(1)
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 300, 511, 512, 513, 700, 1000, 1023, 1024, 1025]
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in [*lengths, 30, 40, 50, 60]]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=48, logprobs=8)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def compare(reference: list[Any], other: list[Any]) -> dict[str, float]:
    """Follow each pair of runs while their histories are equal.

    worst_nats, mean_nats: differences of the log-probability of the reference's token at each such position;
    worst_gap: where runs part, by how much the reference preferred its own token.
    """
    differences, gaps = [], [0.0]
    for left, right in zip(reference, other, strict=True):
        for mine, theirs in zip(left.logprobs, right.logprobs, strict=True):
            value = dict([*theirs.top, (theirs.token_id, theirs.logprob)]).get(mine.token_id, -math.inf)
            differences.append(abs(mine.logprob - value))
            if theirs.token_id != mine.token_id:
                gaps.append(mine.logprob - dict(mine.top).get(theirs.token_id, -math.inf))
                break
    return {
        "positions": len(differences),
        "worst_nats": max(differences),
        "mean_nats": sum(differences) / len(differences),
        "worst_gap": max(gaps),
        "sequences": len(reference),
        "sequences_equal": len(reference) - (len(gaps) - 1),
    }


def agrees(found: dict[str, float]) -> bool:
    """Whether the differences are those of rounding."""
    return (
        found["worst_nats"] <= WORST_NATS
        and found["mean_nats"] <= MEAN_NATS
        and found["worst_gap"] <= 2 * WORST_NATS
    )


def time_to_first_token(llm: LLM, warm: bool, repeats: int = 9) -> float:
    """p50, in milliseconds."""
    rng = random.Random(2)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1)
    prefix = [rng.randint(0, 10000) for _ in range(4096)]
    llm.reset_prefix_cache()
    if warm:
        llm.generate([prefix], params, use_tqdm=False)
    times = []
    for _ in range(repeats + 2):
        if not warm:
            prefix = [rng.randint(0, 10000) for _ in range(4096)]
            llm.reset_prefix_cache()
        prompt = prefix + [rng.randint(0, 10000) for _ in range(128)]
        torch.cuda.synchronize()
        started = time.perf_counter()
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        times.append(time.perf_counter() - started)
        if output.num_cached_tokens != (4096 if warm else 0):
            raise SystemExit(f"{output.num_cached_tokens} prompt tokens came from the cache")
    return statistics.median(times[2:]) * 1e3


def profile(llm: LLM, rows: int = 256, steps: int = 40) -> None:
    """Where a decode step's time goes: host seconds a step, and GPU kernels by total time."""
    from torch.profiler import ProfilerActivity, profile

    prompts = [[random.Random(i).randint(0, 10000) for _ in range(512)] for i in range(rows)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        llm.generate(prompts, params, use_tqdm=False)
    print(
        found.key_averages().table(sort_by="self_device_time_total", row_limit=22, max_name_column_width=60)
    )


def make_llm(options: argparse.Namespace, folder: Path, backend: str, mode: str) -> LLM:
    name, block_size = backend.split(":")
    began = time.perf_counter()
    llm = LLM(
        str(folder),
        progress=False,
        load_format="dummy",
        dtype=options.dtype,
        attention_backend=name,
        block_size=int(block_size),
        enforce_eager=mode == "eager",
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefill_step_ms=options.prefill_step_ms,
        max_model_len=8192 if options.shape != "tiny" else 4096,
    )
    seconds = time.perf_counter() - began
    print(f"{backend} {mode}: ready in {seconds:.1f} s, {llm.core.num_kv_blocks} blocks", flush=True)
    report = llm.core.runner.graph_report
    if (report is None) != (mode == "eager"):
        raise SystemExit(f"mode {mode}, but graphs: {report}")
    if report is not None:
        print(f"    {report}", flush=True)
    return llm


def check_agreement(
    options: argparse.Namespace, llm: LLM, label: str, reference: tuple[str, list[Any]] | None
) -> tuple[str, list[Any]]:
    """Compare greedy runs with themselves (cached prefixes) and with the first configuration's."""
    vocab = SHAPES[options.shape]["vocab_size"]
    runs = greedy_runs(llm, vocab)
    name, expected = reference or (label, runs)
    for what, found in (
        ("itself, with cached prefixes", compare(runs, greedy_runs(llm, vocab))),
        (name, compare(expected, runs)),
    ):
        options.disagreements += not agrees(found)
        print(f"{label} against {what}: {'agrees' if agrees(found) else 'DISAGREES'} {found}", flush=True)
    return reference or (label, runs)


def run_peer(options: argparse.Namespace) -> dict[str, float]:
    """nano-vllm's values by workload, measured now in a process of its own; its lines go to --json too."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "peer.jsonl"
        command = [sys.executable, str(Path(__file__).with_name("gpu_nano.py")), "--shape", options.shape]
        command += ["--workloads", ",".join(options.workloads), "--json", str(file)]
        subprocess.run(command, check=True)
        lines = [json.loads(text) for text in file.read_text().splitlines()]
    if options.json:
        # One run, one command: the report sets both in one table.
        command = result_line("", 0.0, "", model_shape="", attention="")["command"]
        with open(options.json, "a") as out:
            out.writelines(json.dumps(line | {"command": command}) + "\n" for line in lines)
    return {line["workload"]: line["value"] for line in lines}


def best_peer(shape: str, workload_name: str, unit: str, beside: dict[str, float]) -> float | None:
    """The better of the peer measured beside and those of an earlier session."""
    values = [PEERS.get(shape, {}).get(workload_name), beside.get(workload_name)]
    known = [value for value in values if value is not None]
    return (min if unit == "ms" else max)(known, default=None)


def table(shape: str, lines: list[dict[str, Any]], beside: dict[str, float]) -> str:
    """One row a workload; see the module's text."""
    rows = [
        f"{shape:<12}{'nano-vllm now':>14}{'best peer':>11}{'ours':>11}{'ratio':>8}{'limit':>7}{'target':>9}"
    ]
    for line in lines:
        name, value, unit = line["workload"], line["value"], line["unit"]
        now, best = beside.get(name, math.nan), best_peer(shape, name, unit, beside) or math.nan
        target, share = TARGETS.get(shape, {}).get(name, math.nan), line["limit_share"]
        limit = "" if share is None else f"{share:.0%}"
        rows.append(
            f"{name:<12}{now:>14,.2f}{best:>11,.2f}{value:>11,.2f}{value / best:>7.2f}x{limit:>7}"
            f"{target:>9,} {unit}"
        )
    return "\n".join(rows)


def run_workloads(
    options: argparse.Namespace, llm: LLM, backend: str, mode: str, beside: dict[str, float]
) -> list[dict[str, Any]]:
    """The result lines of one configuration."""
    lines = []
    label = f"{backend} {mode}"
    for name in options.workloads:
        more: dict[str, Any] = {"mode": mode}
        if options.quantized:
            more["weights"] = options.quantized
        if name in ("cold", "warm"):
            workload_name, unit = f"TTFT {name}", "ms"
            value = time_to_first_token(llm, name == "warm")
            print(f"{label} {workload_name}: {value:.2f} ms", flush=True)
        else:
            workload_name, unit = name, "output tok/s"
            if name.startswith("bs"):
                measure(llm, name, options.requests, options.longest)
            seconds, prompt, output = measure(llm, name, options.requests, options.longest)
            value = output / seconds
            more["seconds"] = round(seconds, 3)
            print(
                f"{label} {name}: {prompt} prompt + {output} output tokens in {seconds:.2f} s = "
                f"{value:,.0f} output tok/s",
                flush=True,
            )
        limits = {} if options.quantized else LIMITS.get(options.shape, {})
        limit = limits.get(workload_name)
        share = None if limit is None else (limit / value if unit == "ms" else value / limit)
        lines.append(
            result_line(
                workload_name,
                value,
                unit,
                model_shape=options.shape,
                attention=backend,
                peer=None if options.quantized else best_peer(options.shape, workload_name, unit, beside),
                limit_share=share,
                **more,
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantized", choices=QUANTIZED, help="weights as such a checkpoint has them")
    parser.add_argument("--backends", type=names, default=["triton:64"])
    parser.add_argument("--modes", type=names, default=["eager", "graph"])
    parser.add_argument("--workloads", type=names, default=["bs1", "bs32", "A", "cold", "warm"])
    parser.add_argument("--agreement", action="store_true", help="compare greedy runs of all configurations")
    parser.add_argument("--peer", action="store_true", help="run nano-vllm first, on the same workloads")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--prefill-step-ms", type=float, help="EngineConfig.prefill_step_ms")
    parser.add_argument("--phases", action="store_true", help="host time of a step by phase (graph mode)")
    parser.add_argument("--profile", action="store_true", help="GPU kernels by time")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=1)
    options.disagreements = 0
    reference = None
    beside = run_peer(options) if options.peer else {}
    with tempfile.TemporaryDirectory() as temporary:
        shape = SHAPES[options.shape]
        if options.quantized:
            shape = {**shape, "quantization_config": QUANTIZED[options.quantized]}
        folder = write_model(Path(temporary), shape, options.dtype)
        for backend in options.backends:
            for mode in options.modes:
                llm = make_llm(options, folder, backend, mode)
                if options.agreement:
                    reference = check_agreement(options, llm, f"{backend} {mode}", reference)
                lines = run_workloads(options, llm, backend, mode, beside)
                if options.json:
                    with open(options.json, "a") as file:
                        file.writelines(json.dumps(line) + "\n" for line in lines)
                print(table(options.shape, lines, beside), flush=True)
                if options.phases and mode == "graph":
                    for rows in (1, 32, 256):
                        print(phases(llm, rows), flush=True)
                    llm.reset_prefix_cache()
                    prompts, lengths = workload("A", options.requests, options.longest)
                    each = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
                    print("phases of A" + timed_run(llm, prompts, each), flush=True)
                if options.profile:
                    profile(llm)
                llm.close()
    if options.disagreements:
        raise SystemExit(f"{options.disagreements} comparisons failed")


if __name__ == "__main__":
    main()
