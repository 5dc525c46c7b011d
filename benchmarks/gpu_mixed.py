"""Steps that mix decode rows with prompts: requests that come one after the other, as they do at a server.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_mixed.py --shape Qwen3-0.6B --json lines.jsonl
    PYTHONPATH=protocol:engine python3 benchmarks/gpu_mixed.py --shape tiny --device cpu --users 4

A number of users each have one request running and send the next one as soon as it ends; lengths are uniform
from half the mean to one and a half. The core is driven without HTTP. Steps whole and in pieces
(runner/split.py) take turns on one engine; the ratio of a line is its value over that of whole steps. Ranks
of several decide that at their start, so with --tp a run has one kind: --whole has the other. On a CPU there
are no pieces: that shows only that the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from leadline.engine.messages import CoreRequest


def request(name: str, options: argparse.Namespace, rng: random.Random) -> CoreRequest:
    def length(mean: int) -> int:
        return rng.randint(max(2, mean // 2), mean * 3 // 2)

    prompt = [
        rng.randrange(SHAPES[options.shape]["vocab_size"]) for _ in range(length(options.prompt_tokens))
    ]
    sampling = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length(options.output_tokens))
    return CoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=rng.getrandbits(60),
        arrival=time.monotonic(),
    )


def run(llm: LLM, options: argparse.Namespace, name: str) -> dict[str, float]:
    """Output tokens a second, and seconds to the first and between further tokens of a request."""
    core, rng = llm.core, random.Random(1)
    llm.reset_prefix_cache()
    sent, tokens, first, gaps = 0, 0, [], []
    seen: dict[str, float] = {}
    fresh: set[str] = set()

    def send() -> None:
        nonlocal sent
        if sent < options.requests:
            made = request(f"{name}-{sent}", options, rng)
            sent += 1
            seen[made.request_id] = time.perf_counter()
            fresh.add(made.request_id)
            core.add_request(made)

    began = time.perf_counter()
    for _ in range(options.users):
        send()
    while core.has_work():
        for output in core.step():
            key, now = output.request_id, time.perf_counter()
            tokens += len(output.new_token_ids)
            if output.new_token_ids:
                (first if key in fresh else gaps).append(now - seen[key])
                fresh.discard(key)
                seen[key] = now
            if output.finish_reason is not None:
                if output.finish_reason != "length":
                    raise SystemExit(f"{key} ended by {output.finish_reason}: {output.error}")
                send()
    seconds = time.perf_counter() - began
    gaps.sort()
    return {
        "output": tokens / seconds,
        "TTFT p50": statistics.median(first) * 1e3,
        "ITL p50": gaps[len(gaps) // 2] * 1e3,
        "ITL p99": gaps[len(gaps) * 99 // 100] * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="no steps in pieces")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="the better of so many runs counts")
    parser.add_argument("--json", type=Path, help="append lines for results.jsonl there")
    options = parser.parse_args()
    os.environ["LEADLINE_SPLIT_STEPS"] = str(int(not options.whole))
    with tempfile.TemporaryDirectory() as folder:
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        model = write_model(Path(folder), SHAPES[options.shape], dtype)
        llm = LLM(
            str(model),
            device=options.device,
            progress=False,
            load_format="dummy",
            dtype=dtype,
            tensor_parallel=options.tp,
            max_model_len=4096,
        )
        found = measure(llm, options)
        llm.close()
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines(options, found))
    return 0


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By mode."""
    runner: Any = getattr(llm.core.runner, "runner", llm.core.runner)
    splitter = runner.splitter
    print(f"costs, us: {splitter and splitter.costs}", flush=True)
    modes = {"whole": None, "in pieces": splitter}
    if options.whole or options.tp > 1:
        del modes["in pieces" if options.whole else "whole"]
    run(llm, argparse.Namespace(**{**vars(options), "requests": 2 * options.users}), "warm-up")
    found: dict[str, dict[str, float]] = {}
    for round_ in range(options.rounds):
        for mode, used in modes.items():
            runner.splitter = used
            row = run(llm, options, f"{mode}-{round_}")
            print(mode, {name: round(value, 2) for name, value in row.items()}, flush=True)
            if mode not in found or row["output"] > found[mode]["output"]:
                found[mode] = row
    return found


def lines(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    workload = f"{options.users} users, {options.prompt_tokens} in, {options.output_tokens} out"
    whole = found.get("whole", {})
    return [
        result_line(
            f"{workload}: {name}",
            value,
            "output tok/s" if name == "output" else "ms",
            model_shape=options.shape,
            attention="",
            peer=None if mode == "whole" else whole.get(name),
            mode=f"steps {mode}",
            gpus=options.tp,
        )
        for mode, row in found.items()
        for name, value in row.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
