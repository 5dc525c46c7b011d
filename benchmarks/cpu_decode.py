"""Decode speed on CPU: our engine beside transformers' `generate`, SmolLM2 in float32, one run, one process.

    python benchmarks/cpu_decode.py [--batches 1,8] [--new-tokens 64] [--repeats 5]

Decode tokens/s is batch * (n - 1) / (time of the last token - time of the first one): prefill is not in it.
The two engines take turns, so that whatever else the machine does hits both; medians are reported, and
every repeat must give the same tokens from both engines.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from tqdm import tqdm

from core_requests import add_greedy
from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.hub.local import LocalModel
from record import record

PROMPT_TOKENS = 32


class Transformers:
    """transformers' own generate, greedy, no end token."""

    name, version = "transformers", transformers.__version__

    def __init__(self, local: LocalModel) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(local.path, dtype=torch.float32)
        defaults = self.model.generation_config
        defaults.eos_token_id = None
        defaults.do_sample = False
        defaults.temperature = defaults.top_k = defaults.top_p = None

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        times: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(time.perf_counter())
            return scores

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answer = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([stamp]),
            )
        tokens = answer[:, ids.shape[1] :].tolist()
        return len(prompts) * (new_tokens - 1) / (times[-1] - times[0]), tokens


class Leadline:
    """Our engine core, in process, without tokenizer or HTTP, as `generate` is."""

    def __init__(self, local: LocalModel) -> None:
        config = EngineConfig(model="smollm2", device="cpu", prefix_caching=False, max_model_len=1024)
        self.core = EngineCore(config, local, progress=False)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        tokens = add_greedy(self.core, prompts, new_tokens)
        times = []
        while self.core.has_work():
            outputs = self.core.step()
            times.append(time.perf_counter())
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
        assert len(times) == new_tokens, "every step must give every row a token"
        return len(prompts) * (new_tokens - 1) / (times[-1] - times[0]), list(tokens.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch threads of both; default: torch's own choice")
    parser.add_argument("--no-record", action="store_true", help="do not append to results.jsonl")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    local = resolve_model("smollm2")
    theirs, ours = Transformers(local), Leadline(local)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, transformers {theirs.version}")
    rng = torch.Generator().manual_seed(1)
    rows = []
    for batch in map(int, options.batches.split(",")):
        prompts = torch.randint(100, 40_000, (batch, PROMPT_TOKENS), generator=rng).tolist()
        rates: dict[str, list[float]] = {"theirs": [], "ours": []}
        for repeat in tqdm(range(options.repeats + 1), desc=f"batch {batch}"):
            answers = {}
            for name, engine in (("theirs", theirs), ("ours", ours)):
                rate, answers[name] = engine.run(prompts, options.new_tokens)
                if repeat:  # the first round warms up
                    rates[name].append(rate)
            same = sum(a == b for a, b in zip(answers["theirs"], answers["ours"], strict=True))
            if repeat == 0:
                print(f"batch {batch}: {same} of {batch} answers equal token by token")
        median = {name: statistics.median(values) for name, values in rates.items()}
        rows.append((batch, median["theirs"], median["ours"], median["ours"] / median["theirs"]))
    print(f"\n{'batch':>5} {'transformers tok/s':>20} {'leadline tok/s':>16} {'ratio':>7}")
    for batch, a, b, ratio in rows:
        print(f"{batch:>5} {a:>20.1f} {b:>16.1f} {ratio:>7.2f}")
        if not options.no_record:
            workload = f"cpu decode, SmolLM2-135M float32, batch {batch}"
            record(workload, a, "tokens/s", engine=theirs.name, engine_version=theirs.version)
            record(workload, b, "tokens/s", peer_ratio=ratio)


if __name__ == "__main__":
    main()
