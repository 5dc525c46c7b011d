"""What a long prompt does to the streams beside it, and how long it takes itself.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_long_prompt.py --shape Qwen3-8B --prompt-tokens 100000

16 requests decode; then one long prompt arrives. Printed for each `--step-ms` (EngineConfig.prefill_step_ms,
0: no bound): the prompt's time to first token alone and beside the streams, and the time between tokens of
the streams meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from leadline.engine.messages import CoreRequest
from needs import need


class Load:
    """Requests of one engine core; `gaps` collects seconds between tokens of the streams."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.core, self.name, self.rng = llm.core, name, random.Random(name)
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []

    def send(self, request_id: str, tokens: int, output: int) -> str:
        request_id = f"{self.name} {request_id}"
        self.core.add_request(
            CoreRequest(
                request_id=request_id,
                prompt_token_ids=[self.rng.randrange(10000) for _ in range(tokens)],
                sampling=SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output),
                seed=1,
                arrival=time.monotonic(),
            )
        )
        return request_id

    def until(self, request_id: str) -> float:
        """Step until the request has a token; returns the seconds that took."""
        began = time.perf_counter()
        while True:
            found = False
            for output in self.core.step():
                now = time.perf_counter()
                if not output.new_token_ids:
                    continue
                found |= output.request_id == request_id
                if output.request_id in self.last:
                    self.gaps.append(now - self.last[output.request_id])
                self.last[output.request_id] = now
            if found:
                return time.perf_counter() - began

    def end(self) -> None:
        for request_id in self.last:
            self.core.abort(request_id)
        while self.core.has_work():
            self.core.step()


def measure(llm: LLM, options: argparse.Namespace, label: str) -> dict[str, float]:
    found = {}
    for what, streams in (("warm-up", options.streams), ("alone", 0), ("beside", options.streams)):
        llm.reset_prefix_cache()
        load = Load(llm, f"{label} {what}")
        names = [load.send(f"stream {number}", 128, 8000) for number in range(streams)]
        for name in names:
            if name not in load.last:
                load.until(name)
        tokens = options.prompt_tokens // 10 if what == "warm-up" else options.prompt_tokens
        load.gaps.clear()
        found[f"TTFT {what}"] = load.until(load.send("long", tokens, 2)) * 1e3
        gaps = sorted(load.gaps) or [0.0]
        load.end()
    del found["TTFT warm-up"]
    return found | {
        "ITL p50": gaps[len(gaps) // 2] * 1e3,
        "ITL p99": gaps[len(gaps) * 99 // 100] * 1e3,
        "ITL max": gaps[-1] * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument(
        "--step-ms", type=lambda text: [float(x) for x in text.split(",")], default=[0.0, 50.0]
    )
    parser.add_argument("--json", type=Path, help="append lines for results.jsonl there")
    options = parser.parse_args()
    need(gpus=1)
    shape = SHAPES[options.shape] | {"max_position_embeddings": options.prompt_tokens + 16_384}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, "bfloat16")
        for step_ms in options.step_ms:
            with LLM(
                str(model), progress=False, load_format="dummy", dtype="bfloat16", prefill_step_ms=step_ms
            ) as llm:
                found = measure(llm, options, f"{step_ms:g}")
            mode = f"prefill_step_ms {step_ms:g}"
            print(mode, {name: round(value, 1) for name, value in found.items()}, flush=True)
            if options.json is None:
                continue
            with options.json.open("a", encoding="utf-8") as file:
                for name, value in found.items():
                    workload = f"{options.prompt_tokens:,} tokens beside {options.streams} streams: {name}"
                    line = result_line(
                        workload, value, "ms", model_shape=options.shape, attention="triton:64", mode=mode
                    )
                    file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
