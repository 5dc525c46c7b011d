"""Time to first token of 16 requests that share a 512-token prefix: prefix cache on and off, SmolLM2 on
CPU, one run.

    python benchmarks/prefix_ttft.py [--requests 16] [--prefix 512] [--suffix 16] [--repeats 3]

All requests arrive at once and the cache is empty at the start of every repeat: what is measured is that a
shared prefix is computed once while its sharers wait for it. The two settings take turns; medians of means
are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tqdm import tqdm

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.messages import CoreRequest
from leadline.engine.sampling_params import SamplingParams
from record import record


def mean_ttft(core: EngineCore, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from arrival to first token, mean over the requests, and all tokens."""
    core.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens)
    start = time.monotonic()
    for i, prompt in enumerate(prompts):
        core.add_request(
            CoreRequest(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling=sampling,
                seed=0,
                arrival=time.monotonic(),
            )
        )
    first: dict[str, float] = {}
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while core.has_work():
        outputs = core.step()
        now = time.monotonic()
        for output in outputs:
            first.setdefault(output.request_id, now - start)
            tokens[output.request_id] += output.new_token_ids
    return statistics.mean(first.values()), list(tokens.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--suffix", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="do not append to results.jsonl")
    options = parser.parse_args()
    local = resolve_model("smollm2")
    config = EngineConfig(model="smollm2", device="cpu", max_model_len=1024)
    on = EngineCore(config, local, progress=False)
    off = EngineCore(config.replace(prefix_caching=False), local, model=on.runner.model, progress=False)
    rng = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(100, 40_000, (count,), generator=rng).tolist()

    times: dict[str, list[float]] = {"on": [], "off": []}
    for repeat in tqdm(range(options.repeats + 1)):
        shared = draw(options.prefix)
        prompts = [shared + draw(options.suffix) for _ in range(options.requests)]
        answers = {}
        for name, core in (("on", on), ("off", off)):
            seconds, answers[name] = mean_ttft(core, prompts, options.new_tokens)
            if repeat:  # the first round warms up
                times[name].append(seconds)
        same = sum(a == b for a, b in zip(answers["on"], answers["off"], strict=True))
        if repeat == 0:
            print(f"{same} of {len(prompts)} answers equal with the cache on and off")
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = median["on"] / median["off"]
    print(f"\n{options.requests} requests, {options.prefix} shared tokens + {options.suffix} own")
    print(f"{'cache':>6} {'mean TTFT ms':>14}")
    print(
        f"{'off':>6} {median['off'] * 1e3:>14.0f}\n{'on':>6} {median['on'] * 1e3:>14.0f}   ratio {ratio:.2f}"
    )
    if not options.no_record:
        workload = (
            f"cpu TTFT, {options.requests} requests sharing {options.prefix} tokens, SmolLM2-135M float32"
        )
        record(f"{workload}, cache off", median["off"], "seconds")
        record(f"{workload}, cache on", median["on"], "seconds", peer_ratio=ratio)


if __name__ == "__main__":
    main()
