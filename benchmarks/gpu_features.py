"""Speculation, FP8 and profile hooks on one GPU, each on and off; random weights of a named shape.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_features.py --shape Qwen3-8B --json results.jsonl

speculation  B requests at once, 256 tokens each, drafts of --draft tokens. Random weights say nothing of how
             well drafts do, so their quality is set: a drafter that knows the answer is wrong about a part
             of it. For each B: tok/s without, with drafts that are always right, right 3 times in 4, half the
             time; and by prompt lookup, as it comes. From these follows the B at which it stops paying.
             So that there is one answer, however many rows a step has, the model is made to be sure of it
             (`make_sure`): kernels and bytes are those of any weights.
fp8          tok/s of bs1, bs32 and A (gpu_engine's) with FP8 weights, with an FP8 KV cache, with both, beside
             bfloat16 in this run; and decode at 32 requests of 6,000 tokens, where the cache is what is read.
hooks        bs1 with NVTX ranges on and off.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_engine import measure
from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.engine import LLM, SamplingParams
from needs import need

QUALITIES = {"always right": 0.0, "3 of 4 right": 0.25, "1 of 2 right": 0.5}
"""Name → share of tokens that are wrong."""
OUTPUT_TOKENS = 256


def make_sure(llm: LLM) -> None:
    """Let every token be followed by one other by a wide margin. Layers add a thousandth of what they did; an
    untied head has the embedding of the token before in each row, a tied one repeats the token."""
    model = llm.core.runner.model
    with torch.inference_mode():
        for layer in model.layers:
            layer.o.weight.mul_(1e-3)
            layer.down.weight.mul_(1e-3)
        if not model.head.tied:
            model.head.linear.weight.copy_(model.embed.weight.roll(1, 0))


class KnowingDrafter:
    """Proposes the answer, with a `wrong` share of it changed: positions drawn once, so that the pauses after
    failures (powers of 2) do not fall in step with them."""

    def __init__(self, prompt: list[int], answer: list[int], wrong: float) -> None:
        rng = random.Random(sum(prompt))
        self.length = len(prompt)
        self.draft = [token ^ 1 if rng.random() < wrong else token for token in answer]

    def propose(self, tokens: Any, limit: int) -> list[int]:
        done = len(tokens) - self.length
        return self.draft[done : done + limit]


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.vocab = SHAPES[options.shape]["vocab_size"]

    def engine(self, **settings: Any) -> LLM:
        settings = {"max_model_len": self.options.max_model_len, **settings}
        return LLM(
            str(self.folder),
            progress=False,
            load_format="dummy",
            dtype=self.options.dtype,
            attention_backend="triton",
            block_size=64,
            **settings,
        )

    def note(self, workload: str, value: float, unit: str, base: float | None = None, **more: Any) -> None:
        ratio = f" ({value / base:.2f}x)" if base else ""
        print(f"{workload}: {value:,.1f} {unit}{ratio}", flush=True)
        line = result_line(
            workload, value, unit, model_shape=self.options.shape, attention="triton:64", peer=base, **more
        )
        if self.options.json:
            with open(self.options.json, "a") as file:
                file.write(json.dumps(line) + "\n")

    # -- speculation -----------------------------------------------------------------------------------------

    def speculation(self) -> None:
        draft = self.options.draft
        pool = {"num_kv_blocks": 4096, "gpu_memory_utilization": 0.95}  # two engines share the GPU
        plain = self.engine(**pool)
        drafting = self.engine(
            speculative_ngram=draft, speculative_match=2, speculative_max_batch=256, **pool
        )
        for llm in (plain, drafting):
            make_sure(llm)
        scheduler = drafting.core.scheduler
        lookup = scheduler._speculation._make_drafter
        for batch in self.options.batches:
            rng = random.Random(batch)
            prompts = [[rng.randrange(10_000) for _ in range(64)] * 2 for _ in range(batch)]
            base, answers = self.run(plain, prompts)
            self.note(f"speculation, {batch} requests: off", base, "output tok/s")
            known = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
            for name, wrong in QUALITIES.items():
                scheduler._speculation._make_drafter = lambda request, wrong=wrong, known=known: (
                    KnowingDrafter(request.prompt_token_ids, known[tuple(request.prompt_token_ids)], wrong)
                )
                self.drafted(drafting, prompts, f"speculation, {batch} requests: drafts {name}", base)
            scheduler._speculation._make_drafter = lookup
            self.drafted(drafting, prompts, f"speculation, {batch} requests: prompt lookup", base)
        plain.close()
        drafting.close()

    def drafted(self, llm: LLM, prompts: list[list[int]], name: str, base: float) -> None:
        before = llm.core.stats()
        rate, _ = self.run(llm, prompts)
        after = llm.core.stats()
        drafted = after.drafted_tokens_total - before.drafted_tokens_total
        accepted = after.accepted_tokens_total - before.accepted_tokens_total
        share = accepted / drafted if drafted else 0.0
        print(f"    {accepted:,} of {drafted:,} drafted tokens accepted ({share:.0%})")
        self.note(name, rate, "output tok/s", base, accepted_share=round(share, 3))

    def run(self, llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Output tokens per second of the better of two runs, and the output of the last."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
        best, answers = 0.0, []
        for _ in range(2):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            best = max(best, len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - began))
            answers = [output.outputs[0].token_ids for output in outputs]
        return best, answers

    # -- FP8 -------------------------------------------------------------------------------------------------

    def fp8(self) -> None:
        base: dict[str, float] = {}
        for name, settings in (
            ("bfloat16", {}),
            ("fp8 weights", {"quantization": "fp8"}),
            ("fp8 KV cache", {"kv_cache_dtype": "fp8"}),
            ("fp8 weights and KV cache", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
        ):
            llm = self.engine(**settings)
            tokens = llm.core.num_kv_blocks * 64
            self.note(f"{name}: KV pool", tokens, "tokens", base.setdefault("pool", tokens))
            for workload in self.options.workloads:
                if workload.startswith("bs"):
                    measure(llm, workload, self.options.requests, 1024)
                seconds, _, output = measure(llm, workload, self.options.requests, 1024)
                rate = output / seconds
                self.note(f"{name}: {workload}", rate, "output tok/s", base.setdefault(workload, rate))
            rate = self.long_decode(llm)
            label = f"{name}: 32 requests of 6,000 tokens, decode"
            self.note(label, rate, "output tok/s", base.setdefault("long", rate))
            llm.close()

    def long_decode(self, llm: LLM) -> float:
        """Output tokens per second after the first token, at 32 long contexts."""
        rng = random.Random(7)
        length = min(6000, self.options.max_model_len - 140)
        prompts = [[rng.randrange(10_000) for _ in range(length)] for _ in range(32)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        llm.reset_prefix_cache()
        llm.generate(prompts, params, use_tqdm=False)
        # Prefixes are cached now: what is left of a prefill is one block a request.
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=128)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return 32 * 128 / (time.perf_counter() - began)

    # -- hooks -----------------------------------------------------------------------------------------------

    def hooks(self) -> None:
        from leadline.engine.profiling import nvtx_sink

        llm = self.engine()
        rates: dict[bool, list[float]] = {False: [], True: []}
        measure(llm, "bs1", 1, 1024)
        for on in (False, True) * 3:
            llm.core.phases.sink = nvtx_sink() if on else None
            seconds, _, output = measure(llm, "bs1", 1, 1024)
            rates[on].append(output / seconds)
        off, on_rate = max(rates[False]), max(rates[True])
        self.note("bs1 without NVTX ranges", off, "output tok/s")
        self.note("bs1 with NVTX ranges", on_rate, "output tok/s", off)
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", default="speculation,fp8,hooks")
    parser.add_argument(
        "--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--draft", type=int, default=4, help="tokens drafted a step")
    parser.add_argument("--workloads", type=lambda t: t.split(","), default=["bs1", "bs32", "A"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=1)
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options, write_model(Path(temporary), SHAPES[options.shape], options.dtype))
        for part in options.parts.split(","):
            print(f"-- {part}", flush=True)
            getattr(bench, part)()


if __name__ == "__main__":
    main()
