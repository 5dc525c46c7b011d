"""Decode throughput by the number of running requests, for one or more model shapes on one GPU.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_rows.py --shapes Qwen3-0.6B,Qwen3-8B --json rows.jsonl
    PYTHONPATH=protocol:engine python3 benchmarks/gpu_rows.py --plot rows.jsonl

Each run has ROWS requests of 128 prompt tokens; the clock starts when all of them decode. Adding a request
must never give fewer tokens a second in all: a row that does is marked, and the exit status is 1 when one
loses more than SPREAD.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from leadline.engine.messages import CoreRequest

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33, 40, 48, 56, 64, 65, 80, 96, 128, 160, 192, 224, 256]
SPREAD = 0.01
"""Differences between two runs of one configuration."""
_PROMPT = 128


def decode_rate(llm: LLM, rows: int, steps: int) -> float:
    """Output tokens a second of `rows` requests over `steps` decode steps."""
    core, rng = llm.core, random.Random(rows)
    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps + 256)
    names = [f"{time.monotonic_ns()}-{number}" for number in range(rows)]
    for number, name in enumerate(names):
        core.add_request(
            CoreRequest(
                request_id=name,
                prompt_token_ids=[rng.randrange(10000) for _ in range(_PROMPT)],
                sampling=sampling,
                seed=number,
                arrival=time.monotonic(),
            )
        )
    prefilling, tokens, began = set(names), 0, 0.0
    while tokens < rows * steps:
        outputs = core.step()
        if prefilling:
            prefilling.difference_update(output.request_id for output in outputs)
            began = time.perf_counter()
        else:
            tokens += sum(len(output.new_token_ids) for output in outputs)
    rate = tokens / (time.perf_counter() - began)
    for name in names:
        core.abort(name)
    while core.has_work():
        core.step()
    return rate


def measure(shape: str, options: argparse.Namespace) -> dict[int, float]:
    """Tokens a second by rows; the better of two runs each."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPES[shape], "bfloat16")
        with LLM(
            str(model),
            progress=False,
            load_format="dummy",
            dtype="bfloat16",
            quantization=options.quantization,
            max_model_len=4096,
        ) as llm:
            decode_rate(llm, 256, 8)
            return {
                rows: max(decode_rate(llm, rows, options.steps) for _ in range(options.rounds))
                for rows in options.rows
            }


def losses(rates: dict[int, float]) -> dict[int, float]:
    """By rows: the share of tokens a second lost against the best smaller number of rows."""
    best, lost = 0.0, {}
    for rows, rate in sorted(rates.items()):
        if rate < best:
            lost[rows] = 1 - rate / best
        best = max(best, rate)
    return lost


def plot(lines: list[dict[str, Any]], target: Path) -> None:
    """Tokens a second over rows, a curve a shape and commit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        key = (line["model_shape"], line["commit"])
        curves.setdefault(key, {})[line["rows"]] = line["value"]
    shapes = list(dict.fromkeys(shape for shape, _ in curves))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for (of, commit), rates in curves.items():
            if of == shape:
                axis.plot(list(rates), list(rates.values()), marker=".", label=commit)
        axis.set(title=shape, xlabel="running requests", ylabel="output tokens/s", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=ROWS)
    parser.add_argument("--steps", type=int, default=100, help="decode steps a run")
    parser.add_argument("--rounds", type=int, default=2, help="the better of so many runs counts")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--json", type=Path, help="append lines for results.jsonl there")
    parser.add_argument("--plot", type=Path, help="draw the lines of this file and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        lines = [json.loads(text) for text in options.plot.read_text(encoding="utf-8").splitlines()]
        plot([line for line in lines if "rows" in line], Path(__file__).parent / "plots" / "decode_rows.png")
        return 0
    failed = False
    for shape in options.shapes:
        rates = measure(shape, options)
        lost = losses(rates)
        for rows, rate in rates.items():
            mark = f"   {lost[rows]:.1%} below fewer rows" if rows in lost else ""
            print(f"{shape} {rows:>4} rows {rate:>10,.0f} tok/s{mark}", flush=True)
        failed |= any(share > SPREAD for share in lost.values())
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                for rows, rate in rates.items():
                    kind = f" {options.quantization}" if options.quantization else ""
                    line = result_line(
                        f"decode, {rows} rows{kind}", rate, "output tok/s", model_shape=shape,
                        attention="triton:64", rows=rows,
                    )  # fmt: skip
                    file.write(json.dumps(line) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
