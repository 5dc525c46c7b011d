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

from leadline.engine.hub import resolve_model
from leadline.engine.models.config import load_model_config
from leadline.engine.models.fp8 import FP8, LARGEST
from leadline.engine.models.loader import load_model
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
    """What float32 greedily adds, by running everything again for each token: slow, and needs no cache."""
    added = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(dense_logits(model, ids, len(ids) - 1, False).argmax()))
        added.append(ids[len(prompt) :])
    return added


def compare(reference: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Both float32 [places, vocab]."""
    ours, theirs = (x - x.mean(dim=1, keepdim=True) for x in (reference, other))
    divergence = F.kl_div(other.log_softmax(1), reference.log_softmax(1), reduction="none", log_target=True)
    return {
        "logit error": float((theirs - ours).square().mean().sqrt() / ours.square().mean().sqrt()),
        "KL": float(divergence.sum(dim=1).mean()),
        "top token": float((reference.argmax(1) == other.argmax(1)).float().mean()),
    }


def quality(prompts: list[list[int]], added: list[list[int]], base: Any, name: str) -> dict[str, float]:
    changes = CONFIGURATIONS[name]
    model = load(**changes)
    pairs = []
    for prompt, more in zip(prompts, added, strict=True):
        ids, first = prompt + more[:-1], len(prompt) - 1
        pairs.append(
            (
                dense_logits(base, ids, first, False),
                dense_logits(model, ids, first, bool(changes.get("fp8_kv"))),
            )
        )
    return compare(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))


def main() -> None:
    from exact_prompts import NEW_TOKENS, make_prompts

    from record import record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="do not append to results.jsonl")
    options = parser.parse_args()
    prompts = make_prompts(Tokenizer.load(resolve_model("smollm2", progress=False).path))
    base = load()
    added = continuations(prompts, base, NEW_TOKENS)
    for name in CONFIGURATIONS:
        found = quality(prompts, added, base, name)
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
        if not options.no_record:
            for key, value in found.items():
                unit = "nats" if key == "KL" else "share"
                record(f"quality of {name}, SmolLM2 on CPU, 30 prompts: {key}", value, unit)


if __name__ == "__main__":
    main()
