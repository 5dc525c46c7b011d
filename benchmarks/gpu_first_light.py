"""First light on a GPU: the whole engine with random weights, on every attention backend.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_first_light.py --json results.jsonl
    PYTHONPATH=protocol:engine python3 benchmarks/gpu_first_light.py --shape tiny --workloads A --requests 8
    --backends torch:64

1. Agreement: the same greedy requests on each backend; wherever two runs have the same history, the
   log-probability they report for the same token must agree within WORST_NATS, and they may part only
   where the two best tokens are that close (a tie in bfloat16). The first backend named is the reference.
2. Workload A: 256 requests, prompts and outputs of U(100, 1024) tokens, all at once, temperature 0.6
   (142,827 prompt and 133,966 output tokens). bs1 and bs32: 128 tokens in, 256 out.

The model folder (config.json and a byte-level tokenizer of made-up words) is written to a temporary place.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_results import result_line
from leadline.engine import LLM, SamplingParams

SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 12000,
        "max_position_embeddings": 4096,
    },
}
LIMITS = {("Qwen3-0.6B", "A"): 36_000, ("Qwen3-0.6B", "bs1"): 3_590, ("Qwen3-0.6B", "bs32"): 64_000}
"""tok/s no engine can pass on one H200: every weight once a step, every KV byte once, no overlap."""
PEERS = {("Qwen3-0.6B", "A"): 20_200, ("Qwen3-0.6B", "bs1"): 421, ("Qwen3-0.6B", "bs32"): 13_900}
"""The better of nano-vllm bb823b3 and vLLM 0.26.0, measured on an H200 in an earlier session."""
WORST_NATS, MEAN_NATS = 0.15, 0.02
"""Differences of log-probabilities that count as agreement. Backends differ by 2**-8 relative in each layer's
attention, through 28 layers of bfloat16, and logits themselves are rounded to 2**-6. Scaling attention by
1.1 in 6 layers, as a trial, moved the mean by 0.03."""


def write_model(folder: Path, shape: dict[str, int], dtype: str) -> Path:
    """A Qwen3 config.json and a tokenizer whose words are the bytes and w256, w257, ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = {
        **shape,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{i}" for i in range(len(words), shape["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def workload(name: str, requests: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths. "A" draws as nano-vllm's own benchmark does."""
    rng = random.Random(0)
    if name == "A":
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, longest))] for _ in range(requests)]
        return prompts, [rng.randint(100, longest) for _ in range(requests)]
    count = min(int(name.removeprefix("bs")), requests)
    return [[rng.randint(0, 10000) for _ in range(128)] for _ in range(count)], [256] * count


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


def _share(shape: str, name: str, value: float) -> float | None:
    limit = LIMITS.get((shape, name))
    return value / limit if limit else None


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


def run_backend(
    options: argparse.Namespace, folder: Path, backend: str, reference: list[Any] | None
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Agreement and workloads of one backend; returns its greedy runs and its result lines."""
    name, block_size = backend.split(":")
    began = time.perf_counter()
    llm = LLM(
        str(folder),
        progress=False,
        load_format="dummy",
        dtype=options.dtype,
        attention_backend=name,
        block_size=int(block_size),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=4096,
    )
    print(
        f"{backend}: ready in {time.perf_counter() - began:.1f} s, {llm.core.num_kv_blocks} blocks",
        flush=True,
    )
    vocab = SHAPES[options.shape]["vocab_size"]
    runs = greedy_runs(llm, vocab)
    for what, found in (
        ("itself, with cached prefixes", compare(runs, greedy_runs(llm, vocab))),
        (options.backends[0], compare(reference or runs, runs)),
    ):
        options.disagreements += not agrees(found)
        print(f"{backend} against {what}: {'agrees' if agrees(found) else 'DISAGREES'} {found}", flush=True)
    lines = []
    for workload_name in options.workloads if backend in options.measured else []:
        seconds, prompt, output = measure(llm, workload_name, options.requests, options.longest)
        print(
            f"{backend} {workload_name}: {prompt} prompt + {output} output tokens in {seconds:.2f} s = "
            f"{output / seconds:,.0f} output tok/s",
            flush=True,
        )
        lines.append(
            result_line(
                workload_name,
                output / seconds,
                "output tok/s",
                model_shape=options.shape,
                attention=backend,
                peer=PEERS.get((options.shape, workload_name)),
                limit_share=_share(options.shape, workload_name, output / seconds),
                seconds=round(seconds, 2),
            )
        )
    if options.profile and backend in options.measured:
        profile(llm)
    return runs, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--backends", type=lambda s: s.split(","), default=["torch:64", "flash_attn:256", "triton:64"]
    )
    parser.add_argument(
        "--measured", type=lambda s: s.split(","), help="backends that run the workloads; default all"
    )
    parser.add_argument("--workloads", type=lambda s: s.split(","), default=["bs1", "bs32", "A"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    options.measured = options.measured or options.backends
    options.disagreements = 0
    reference = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), SHAPES[options.shape], options.dtype)
        for backend in options.backends:
            runs, lines = run_backend(options, folder, backend, reference)
            reference = reference or runs
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
            gc.unfreeze()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if options.disagreements:
        raise SystemExit(f"{options.disagreements} comparisons failed")


if __name__ == "__main__":
    main()
