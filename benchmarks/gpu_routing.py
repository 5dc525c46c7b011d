"""Routing policies before two engines on two GPUs: `leadline bench routing` with random weights.

    PYTHONPATH=protocol:engine:gateway:cli python3 benchmarks/gpu_routing.py --json lines.jsonl --out DIR

Chats over HTTP through the gateway, one engine a GPU. Conversations share a system prompt with others, and
each turn sends all of its conversation so far as text, the answers as they came back. (The made-up tokenizer
reads an answer again as the ids that were sampled, but for one answer in five or so that holds a single byte:
there the rest of it is not found again, under any policy. The ceiling knows, since it is made of the same
texts.)

Measured with two sizes of the KV pool:

    whole    all that fits into an H200: many times the workload. A miss is cold: what a policy costs is
             that both GPUs compute the same system prompts, and a history again where its turns change place.
    bounded  the blocks of `--pool-share` of all the workload's tokens on each GPU. Half of them fit, so a
             policy that keeps conversations together keeps them; one that spreads them pushes them out.

With --json lines go there, and the plot into --out; without, nothing is written. The ratio of a line is its
value over that of the first policy. Further options go to `leadline bench routing`, which has more of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_models import SHAPES, write_model
from gpu_results import result_line
from leadline.cli.main import main as command
from leadline.cli.routing.conversations import WORDS
from routing_plot import plot

BLOCK_SIZE = 64
CHAT_TOKENS = 32
"""What the template adds to a question and its answer, and a little more."""
SLACK = 512
"""Tokens of a conversation beyond that: for answers that are read again as more tokens."""
MEASURES = (
    ("hit rate", "share", ("hit_rate",)),
    ("TTFT p50", "s", ("ttft_seconds", "p50")),
    ("TTFT p90", "s", ("ttft_seconds", "p90")),
    ("TTFT mean", "s", ("ttft_seconds", "mean")),
    ("output tokens/s", "tokens/s", ("output_tokens_per_second",)),
    ("tokens/s", "tokens/s", ("tokens_per_second",)),
    ("requests/s", "requests/s", ("requests_per_second",)),
    ("gateway's own part of the mean TTFT", "s", ("mean_ttft_seconds_by", "gateway_own")),
    ("queue in the gateway, part of the mean TTFT", "s", ("mean_ttft_seconds_by", "queue")),
    ("routing's part of the mean TTFT", "s", ("mean_ttft_seconds_by", "routing")),
)


def main() -> int:
    options, further = _parser().parse_known_args()
    replicas = options.replicas
    if "CUDA_VISIBLE_DEVICES" not in os.environ and options.device != "cpu":
        # So that the launcher finds them where there is no nvidia-smi.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(replicas)))
    results: dict[str, dict[str, Any]] = {}
    worst = 0
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary, options.shape)
        model.mkdir()
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        write_model(model, SHAPES[options.shape], dtype, WORDS)
        for pool in options.pools.split(","):
            file = Path(temporary, f"{pool}.json")
            bounds = [f"--num-kv-blocks={_bounded_blocks(options)}"] if pool == "bounded" else []
            began = time.monotonic()
            code = command([*_arguments(options, model), *bounds, *further, f"--json={file}"])
            print(f"\n{pool} pool: {time.monotonic() - began:.0f} s in all\n", flush=True)
            if not file.exists():
                return code or 1
            results[pool] = json.loads(file.read_text(encoding="utf-8"))
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(line) + "\n" for line in _lines(options, pool, results[pool]))
            if options.out is not None:
                _draw(options, results)
            worst = max(worst, code)  # some request failed; the rest is still worth having
    return worst


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="Qwen3-8B", choices=sorted(SHAPES))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--replicas", type=int, default=2, help="engines, one per GPU")
    parser.add_argument("--policies", default="random,least-load,prefix")
    parser.add_argument("--pools", default="whole,bounded", help="whole, bounded or both")
    parser.add_argument("--pool-share", type=float, default=0.6, help="of the workload's tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--clients", type=int, default=64, help="conversations at a time")
    parser.add_argument("--systems", type=int, default=16, help="system prompts")
    parser.add_argument("--system-tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--user-tokens", type=int, default=150)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--think-seconds", type=float, default=0.5, help="mean pause before a turn")
    parser.add_argument("--warm-up", type=int, default=32, help="conversations that are not counted")
    parser.add_argument("--json", type=Path, help="append lines for results.jsonl there")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    return parser


def _arguments(options: argparse.Namespace, model: Path) -> list[str]:
    longest = options.system_tokens + SLACK + options.turns * _turn_tokens(options)
    return [
        *("bench", "routing", str(model), "--load-format=dummy", f"--served-name={options.shape}"),
        *(f"--device={options.device}", f"--max-model-len={-(-longest // 256) * 256}"),
        *(f"--block-size={BLOCK_SIZE}", f"--replicas={options.replicas}", f"--policies={options.policies}"),
        *(f"--rounds={options.rounds}", f"--systems={options.systems}", f"--turns={options.turns}"),
        # Words of the vocabulary, so one is a token.
        *(f"--system-words={options.system_tokens}", f"--user-words={options.user_tokens}"),
        *(f"--conversations={options.conversations}", f"--clients={options.clients}"),
        *(f"--output-tokens={options.output_tokens}", f"--think-seconds={options.think_seconds}"),
        f"--warm-up={options.warm_up}",
    ]


def _turn_tokens(options: argparse.Namespace) -> int:
    return options.user_tokens + options.output_tokens + CHAT_TOKENS


def _bounded_blocks(options: argparse.Namespace) -> int:
    """Of each engine."""
    own = options.conversations * options.turns * _turn_tokens(options)
    return int(options.pool_share * (options.systems * options.system_tokens + own) / BLOCK_SIZE)


def _lines(options: argparse.Namespace, pool: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    def line(name: str, value: float, unit: str, ratio: float | None = None) -> dict[str, Any]:
        made = result_line(f"routing, {pool} pool, {name}", value, unit, model_shape=shape, attention="")
        made |= {"gpus": gpus, "replicas": options.replicas}
        return {**made, "value": float(f"{value:.4g}"), "peer_ratio": ratio}

    shape, gpus = options.shape, 0 if options.device == "cpu" else options.replicas
    base = next(iter(result["policies"].values()))
    lines = [line("prompt tokens sent before", result["ceiling_hit_rate"], "share")]
    for policy, row in result["policies"].items():
        for name, unit, keys in MEASURES:
            value, compared = row, base
            for key in keys:
                value, compared = value[key], compared[key]
            ratio = None if row is base or not compared else round(value / compared, 4)
            lines.append(line(f"{policy}: {name}", value, unit, ratio))
        by = row["mean_ttft_seconds_by"]
        lines.append(
            line(f"{policy}: gateway's share of the mean TTFT", by["gateway_own"] / by["client"], "share")
        )
    return lines


def _draw(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    names = {"whole": "KV pool: whole GPU", "bounded": f"KV pool: {options.pool_share:.0%}\nof the workload"}
    groups = {
        (names[pool], policy): {
            "hit rate": row["hit_rate"],
            "TTFT p50": row["ttft_seconds"]["p50"],
            "TTFT p90": row["ttft_seconds"]["p90"],
            "tokens/s": row["output_tokens_per_second"],
        }
        for pool, result in results.items()
        for policy, row in result["policies"].items()
    }
    title = (
        f"{options.replicas} engines of the {options.shape} shape, one per GPU: {options.conversations} "
        f"conversations of {options.turns} turns over {options.systems} system prompts of "
        f"{options.system_tokens:,} tokens"
    )
    plot(groups, title, options.out / f"routing_{options.shape.lower().replace('.', '_')}.png")


if __name__ == "__main__":
    sys.exit(main())
