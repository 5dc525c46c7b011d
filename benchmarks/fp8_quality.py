"""What FP8 does to the answers of the real model: SmolLM2 on CPU, the 30 prompts of tests/engine/exact.

    python benchmarks/fp8_quality.py [--no-record]

Each prompt with the 24 tokens that float32 greedily adds is run once more in each configuration
(models/fp8.py's reference: the same rounding as on a GPU), and logits are compared at those tokens' places:

    logit error   RMS of the difference over RMS of float32's logits, each about their mean
    KL            of float32's distribution from the other's, nats, mean
    top token     share of places at which both find the same most likely token (a history that is the same)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.messages import CoreRequest
from leadline.engine.models.config import load_model_config
from leadline.engine.models.fp8 import FP8, LARGEST
from leadline.engine.models.loader import load_model
from leadline.engine.sampling_params import SamplingParams
from leadline.protocol.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine" / "exact"))

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp8 weights": {"quantization": "fp8"},
    "fp8 KV cache": {"fp8_kv": True},
    "fp8 weights and KV cache": {"quantization": "fp8", "fp8_kv": True},
}


def dense_logits(model: Any, ids: list[int], first: int, fp8_kv: bool) -> torch.Tensor:
    """float32 [len(ids) - first, vocab]: logits after each token from `first` on, causal attention in one
    piece."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if fp8_kv:
            k, v = (x.clamp(-LARGEST, LARGEST).to(FP8).to(x.dtype) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), attend)
        logits: torch.Tensor = model.compute_logits(hidden[first:]).float()
    return logits


def load(**changes: Any) -> Any:
    local = resolve_model("smollm2", progress=False)
    return load_model(
        local, load_model_config(local.path), dtype=torch.float32, device="cpu", progress=False, **changes
    )


def continuations(prompts: list[list[int]], model: Any, tokens: int) -> list[list[int]]:
    """What float32 greedily adds."""
    config = EngineConfig(model="smollm2", device="cpu", max_model_len=512, cpu_kv_bytes=1 << 28)
    core = EngineCore(config, resolve_model("smollm2", progress=False), model=model, progress=False)
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    added: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        added[str(number)] = []
        core.add_request(
            CoreRequest(
                request_id=str(number), prompt_token_ids=prompt, sampling=sampling, seed=0, arrival=0.0
            )
        )
    while core.has_work():
        for output in core.step():
            added[output.request_id] += output.new_token_ids
    return list(added.values())


def compare(reference: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Both float32 [places, vocab]."""
    ours, theirs = (x - x.mean(dim=1, keepdim=True) for x in (reference, other))
    divergence = F.kl_div(other.log_softmax(1), reference.log_softmax(1), reduction="none", log_target=True)
    return {
        "logit error": float((theirs - ours).square().mean().sqrt() / ours.square().mean().sqrt()),
        "KL": float(divergence.sum(dim=1).mean()),
        "top token": float((reference.argmax(1) == other.argmax(1)).float().mean()),
    }


def quality(
    prompts: list[list[int]], added: list[list[int]], base: list[torch.Tensor], name: str
) -> dict[str, float]:
    """`base`: float32's logits at the places of `added`, as `logits` gives them."""
    changes = CONFIGURATIONS[name]
    other = logits(load(**changes), prompts, added, bool(changes.get("fp8_kv")))
    return compare(torch.cat(base), torch.cat(other))


def logits(
    model: Any, prompts: list[list[int]], added: list[list[int]], fp8_kv: bool = False
) -> list[torch.Tensor]:
    return [
        dense_logits(model, prompt + more[:-1], len(prompt) - 1, fp8_kv)
        for prompt, more in zip(prompts, added, strict=True)
    ]


def main() -> None:
    from exact_prompts import NEW_TOKENS, make_prompts

    from record import record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="do not append to results.jsonl")
    options = parser.parse_args()
    prompts = make_prompts(Tokenizer.load(resolve_model("smollm2", progress=False).path))
    model = load()
    added = continuations(prompts, model, NEW_TOKENS)
    base = logits(model, prompts, added)
    for name in CONFIGURATIONS:
        found = quality(prompts, added, base, name)
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
        if not options.no_record:
            for key, value in found.items():
                unit = "nats" if key == "KL" else "share"
                record(f"quality of {name}, SmolLM2 on CPU, 30 prompts: {key}", value, unit)


if __name__ == "__main__":
    main()
