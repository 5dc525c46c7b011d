"""Speculation by prompt lookup on CPU: SmolLM2 in float32, prompts whose answers copy, by batch size.

    python benchmarks/speculation.py [--batches 1,2,4,8] [--new-tokens 64] [--draft 4] [--no-record]

Both engines run the same prompts in turn, greedily, and must give the same tokens. Rates are tokens per
second of this process's CPU time on one thread: what else the machine does is not in them, so they can be
compared though it is busy. `peer_ratio` in results.jsonl is the rate over the one without speculation.
"""

from __future__ import annotations

import argparse
import time

import torch

from core_requests import add_greedy
from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.models.config import load_model_config
from leadline.engine.models.loader import load_model
from leadline.protocol.text.tokenizer import Tokenizer
from record import record

COPYING = [
    "red, green, blue, red, green, blue, red, green, blue, red,",
    "A rose is a rose is a rose is a",
    "do re mi fa so la ti do re mi fa so la ti do re mi fa",
    "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday Tuesday",
]
"""Answers go on copying: nearly every draft is right."""
PLAIN = [
    "Once upon a time, in a small village by the sea,",
    "Photosynthesis is the process by which",
    "To make bread you need flour, water,",
    "The three primary colours are",
]
"""Answers copy little: what trying costs."""


class Engine:
    def __init__(self, model: object, local: object, draft: int) -> None:
        config = EngineConfig(
            model="smollm2",
            device="cpu",
            prefix_caching=False,
            max_model_len=1024,
            speculative_ngram=draft,
            speculative_match=2,
            speculative_max_batch=64,
            cpu_threads=1,
        )
        self.core = EngineCore(config, local, model=model, progress=False)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """CPU seconds after the first token of each, and all tokens."""
        tokens = add_greedy(self.core, prompts, new_tokens)
        began = 0.0
        while self.core.has_work():
            for output in self.core.step():
                tokens[output.request_id] += output.new_token_ids
            began = began or time.process_time()
        return time.process_time() - began, list(tokens.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="do not append to results.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = resolve_model("smollm2", progress=False)
    model = load_model(
        local, load_model_config(local.path), dtype=torch.float32, device="cpu", progress=False
    )
    tokenizer = Tokenizer.load(local.path)
    plain, drafting = Engine(model, local, 0), Engine(model, local, options.draft)
    for kind, texts in (("copying", COPYING), ("plain", PLAIN)):
        for batch in map(int, options.batches.split(",")):
            prompts = [tokenizer.encode(texts[i % len(texts)]) for i in range(batch)]
            before = drafting.core.stats()
            best = {"off": float("inf"), "on": float("inf")}
            for _ in range(options.repeats):
                seconds, expected = plain.run(prompts, options.new_tokens)
                best["off"] = min(best["off"], seconds)
                seconds, got = drafting.run(prompts, options.new_tokens)
                best["on"] = min(best["on"], seconds)
                if got != expected:
                    raise SystemExit("speculation changed the tokens")
            after = drafting.core.stats()
            drafted = after.drafted_tokens_total - before.drafted_tokens_total
            accepted = after.accepted_tokens_total - before.accepted_tokens_total
            count = batch * (options.new_tokens - 1)
            rates = {name: count / seconds for name, seconds in best.items()}
            print(
                f"{kind}, batch {batch}: {rates['off']:.1f} → {rates['on']:.1f} tokens/CPU-s "
                f"({rates['on'] / rates['off']:.2f}x), {accepted} of {drafted} drafted tokens accepted",
                flush=True,
            )
            if not options.no_record:
                where = f"speculation, SmolLM2 float32, 1 thread, {kind} prompts, batch {batch}"
                record(f"{where}: off", rates["off"], "tokens/CPU-s")
                record(f"{where}: on", rates["on"], "tokens/CPU-s", peer_ratio=rates["on"] / rates["off"])


if __name__ == "__main__":
    main()
