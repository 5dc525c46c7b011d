"""nano-vllm on the workloads of gpu_engine.py: the peer, on the same machine in the same run.

    python3 benchmarks/gpu_nano.py --shape Qwen3-0.6B --workloads bs1,bs32,A,cold,warm --json peer.jsonl

Needs the PyPI package `nano-vllm-fork` (nano-vllm has no release of its own) and flash-attn. Its settings are
those of its own benchmark: budget 16,384 tokens, up to 512 sequences, CUDA graphs on. Weights are random, as
ours are; its loader is the only thing replaced. gpu_engine.py --peer runs this in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from gpu_workloads import workload
from needs import need

PACKAGE = "nano-vllm-fork"


class _NoText:
    """Stands for the tokenizer, which these workloads do not need."""

    eos_token_id = -1

    def decode(self, token_ids: list[int]) -> str:
        return ""


def make_engine(folder: Path, max_model_len: int, utilization: float) -> Any:
    import nanovllm.config
    import nanovllm.engine.model_runner as model_runner
    from nanovllm import LLM

    def random_weights(model: torch.nn.Module, path: str) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, 0.02)

    auto = nanovllm.config.AutoConfig.from_pretrained

    def plain_rope(*args: Any, **kwargs: Any) -> Any:
        found = auto(*args, **kwargs)
        # transformers 5 reports the plain kind as a dictionary too; nano-vllm knows no other.
        object.__setattr__(found, "rope_scaling", None)
        return found

    model_runner.load_model = random_weights
    nanovllm.config.AutoConfig = type("AutoConfig", (), {"from_pretrained": staticmethod(plain_rope)})
    return LLM(
        str(folder), tokenizer=_NoText(), max_model_len=max_model_len, gpu_memory_utilization=utilization
    )


def measure(llm: Any, prompts: list[list[int]], lengths: list[int]) -> tuple[float, int]:
    """Seconds and output tokens of one run to the end."""
    from nanovllm import SamplingParams

    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    produced = [len(output["token_ids"]) for output in outputs]
    if produced != lengths:
        raise SystemExit(f"asked for {sum(lengths)} output tokens, got {sum(produced)}")
    return seconds, sum(produced)


def time_to_first_token(llm: Any, warm: bool, repeats: int = 9) -> float:
    """p50, in milliseconds; as gpu_engine.time_to_first_token."""
    rng = random.Random(2)
    prefix = [rng.randint(0, 10000) for _ in range(4096)]
    if warm:
        measure(llm, [prefix], [1])
    times = []
    for _ in range(repeats + 2):
        if not warm:
            prefix = [rng.randint(0, 10000) for _ in range(4096)]
        times.append(measure(llm, [prefix + [rng.randint(0, 10000) for _ in range(128)]], [1])[0])
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument(
        "--workloads", type=lambda text: text.split(","), default=["bs1", "bs32", "A", "cold", "warm"]
    )
    parser.add_argument("--utilization", type=float, default=0.9, help="of the GPU's memory")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=1, modules=["nanovllm"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), SHAPES[options.shape], "bfloat16")
        began = time.perf_counter()
        llm = make_engine(folder, 8192, options.utilization)
        print(f"nano-vllm: ready in {time.perf_counter() - began:.1f} s", flush=True)
        prompts, lengths = workload("A", 24, 1024)
        measure(llm, prompts, [4] * len(lengths))  # compiles
        for name in options.workloads:
            if name in ("cold", "warm"):
                label, unit, value = f"TTFT {name}", "ms", time_to_first_token(llm, name == "warm")
            else:
                seconds, tokens = measure(llm, *workload(name, 256, 1024))
                label, unit, value = name, "output tok/s", tokens / seconds
            print(f"nano-vllm {label}: {value:,.2f} {unit}", flush=True)
            line = result_line(label, value, unit, model_shape=options.shape, attention="flash_attn:256")
            line.update(engine="nano-vllm", engine_version=f"{PACKAGE} {version(PACKAGE)}")
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
