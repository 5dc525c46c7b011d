"""Whether several ranks give a real model's greedy tokens as one GPU does, in float32.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_tp_exact.py --model smollm2 --tp 1,2

The 30 prompts of tests/engine/exact, all at once and one by one; graphs on. The exit status counts sequences
that differ; for each, says how far apart the two best tokens were where it parted. LEADLINE_TP_SHARE_GPU=1:
all ranks on one GPU, slowly, since they take turns at it; `--alone 0` leaves out the prompts one by one.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine" / "exact"))

from exact_prompts import NEW_TOKENS, make_prompts

from gpu_engine import compare
from leadline.engine import LLM, SamplingParams
from leadline.protocol.text.tokenizer import Tokenizer
from needs import need


def generate(llm: LLM, prompts: list[list[int]], alone: int) -> list[Any]:
    """Together, then the first ones each alone on a cache of its own making."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=4)
    found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts[:alone]):
        single = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        if single.token_ids != found[index].token_ids:
            print(f"prompt {index}: alone and together differ on this engine", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--alone", type=int, default=30, help="prompts that also run one by one")
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which all stacks are printed")
    options = parser.parse_args()
    need(gpus=max(options.tp))
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    reference, differ = None, 0
    for size in options.tp:
        llm = LLM(
            options.model,
            progress=False,
            dtype=options.dtype,
            attention_backend=options.backend,
            tensor_parallel=size,
            max_concurrent_requests=32,
            gpu_memory_utilization=0.5 / size,
        )
        found = generate(llm, make_prompts(Tokenizer.load(llm.core.local.path)), options.alone)
        reference = reference or found
        result = compare(reference, found)
        differ += int(result["sequences"] - result["sequences_equal"])
        print(f"TP {size} against TP {options.tp[0]}, {options.dtype}: {result}", flush=True)
        llm.close()
    return differ


if __name__ == "__main__":
    sys.exit(main())
