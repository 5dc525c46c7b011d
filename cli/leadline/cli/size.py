"""`leadline size MODEL`: how much memory a model takes, and how many tokens a GPU holds beside it.

Only config.json is read (and fetched).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.engine.models.encoder_config import EncoderConfig

__all__ = ["add_arguments", "run"]

_UTILIZATION = 0.9
_MOST_RANKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="smollm2, hf://org/name[@revision], file:///path, or a path (a folder or a *.gguf file)"
    )
    parser.add_argument("--gpu", default="h200", help="a name (h200, h100, …) or its memory in GiB")
    parser.add_argument("--tp", type=_ranks, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--quantization", choices=["fp8"], help="weights in FP8")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: the model's")
    parser.add_argument("--download-dir", help="folder for what is fetched")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST_RANKS}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the sizes. Returns 0 if one sequence of the context length fits, else 1."""
    from leadline.engine.errors import ConfigError
    from leadline.engine.hub import resolve_model
    from leadline.engine.models.config import load_model_config
    from leadline.engine.models.size import model_size
    from leadline.engine.pooling.spec import encoder_in

    memory = _memory(args.gpu)
    folder = resolve_model(args.model, download_dir=args.download_dir, progress=False, config_only=True).path
    if (encoder := encoder_in(folder)) is not None:
        return _report_encoder(args, encoder, memory)
    config = load_model_config(folder)
    if args.tp > config.num_heads:
        raise ConfigError(f"--tp {args.tp} is more than the model's {config.num_heads} attention heads")
    if args.quantization and config.quantized is not None:
        raise ConfigError(
            "--quantization is for checkpoints that are not quantized; this one is "
            f"({config.quantized.method})"
        )
    length = args.max_model_len or config.max_model_len
    options = {"fp8_weights": args.quantization == "fp8", "fp8_kv": args.kv_cache_dtype == "fp8"}

    def tokens_on(ranks: int, **changes: bool) -> int:
        size = model_size(config, tensor_parallel=ranks, **{**options, **changes})
        return max(0, size.kv_bytes(memory, _UTILIZATION)) // size.kv_per_token

    size = model_size(config, tensor_parallel=args.tp, **options)
    tokens = tokens_on(args.tp)
    report: dict[str, Any] = {
        "model": args.model,
        "architecture": config.architecture,
        "dtype": config.dtype,
        "quantized": None if config.quantized is None else config.quantized.method,
        "tensor_parallel": args.tp,
        "max_model_len": length,
        **asdict(size),
        "gpu": args.gpu,
        "gpu_bytes": memory,
        "kv_bytes": size.kv_bytes(memory, _UTILIZATION),
        "kv_tokens": tokens,
        "fits": tokens >= length,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        heads, plain = config.num_heads, config.quantized is None
        print("\n".join(_lines(report, _advice(args.tp, heads, length, tokens, tokens_on, plain))))
    return 0 if tokens >= length else 1


def _report_encoder(args: argparse.Namespace, config: EncoderConfig, memory: int) -> int:
    """Print the sizes of an encoder. Returns 0 if it fits, else 1."""
    from leadline.engine.errors import ConfigError
    from leadline.engine.models.size import encoder_size

    for option, given in (
        ("--tp", args.tp > 1),
        ("--quantization", args.quantization is not None),
        ("--kv-cache-dtype", args.kv_cache_dtype != "auto"),
    ):
        if given:
            raise ConfigError(f"{option} is for decoders, and {config.architecture} is an encoder")
    size, most = encoder_size(config), int(memory * _UTILIZATION)
    fits = size.weights + size.step <= most
    report: dict[str, Any] = {
        "model": args.model,
        "architecture": config.architecture,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        **asdict(size),
        "gpu": args.gpu,
        "gpu_bytes": memory,
        "fits": fits,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{config.architecture}, {size.parameters / 1e9:,.2f} B parameters, {config.dtype}")
        print(f"weights             {_gib(size.weights)}")
        print(f"largest step        {_gib(size.step)}, with CUDA's own memory (an estimate)")
        print(f"no KV cache; inputs of up to {config.max_model_len:,} tokens")
        result = "fits" if fits else "does not fit"
        print(f"{result}: {args.gpu} has {_gib(memory).strip()}, {_UTILIZATION:.0%} used")
    return 0 if fits else 1


def _named(gpu: str) -> str:
    """Return the name in front of other words; empty for a number of GiB."""
    return "" if gpu[:1].isdigit() or gpu[:1] == "." else f"{gpu}, "


def _memory(gpu: str) -> int:
    """Bytes of a GPU by its name, or of so many GiB. Raises ConfigError."""
    from leadline.engine.errors import ConfigError
    from leadline.engine.models.size import GPUS

    if (known := GPUS.get(gpu.lower())) is not None:
        return known << 20
    try:
        gibibytes = float(gpu.lower().removesuffix("gib"))
    except ValueError:
        gibibytes = 0.0
    if not 0 < gibibytes < 1e6:
        raise ConfigError(f"--gpu {gpu!r} is not known; use {', '.join(GPUS)}, or its memory in GiB")
    return int(gibibytes * 2**30)


def _lines(report: dict[str, Any], advice: str | None) -> list[str]:
    share = " on each GPU" if report["tensor_parallel"] > 1 else ""
    form = f"{report['dtype']}, quantized ({report['quantized']})" if report["quantized"] else report["dtype"]
    lines = [
        f"{report['architecture']}, {report['parameters'] / 1e9:,.2f} B parameters, {form}",
        f"weights             {_gib(report['weights'])}{share}",
        f"KV cache            {report['kv_per_token'] / 1024:8.1f} KiB a token{share}",
        f"largest step        {_gib(report['step'])}{share}, with CUDA's own memory (an estimate)",
        f"left for KV cache   {_gib(report['kv_bytes'])} of {_gib(report['gpu_bytes']).strip()} "
        f"({_named(report['gpu'])}{_UTILIZATION:.0%} used)",
    ]
    length, tokens = report["max_model_len"], report["kv_tokens"]
    if report["fits"]:
        lines.append(f"fits: {tokens:,} tokens, {tokens / length:,.1f} times the full context of {length:,}")
    elif tokens:
        lines.append(f"does not fit: {tokens:,} tokens are left, and one sequence has up to {length:,}")
    else:
        lines.append("does not fit: the weights and one step need more than the GPU has")
    return lines if advice is None else [*lines, advice]


def _advice(ranks: int, heads: int, length: int, tokens: int, tokens_on: Any, plain: bool) -> str | None:
    """What would make the model fit, if it does not. `plain`: its weights are not quantized."""
    if tokens >= length:
        return None
    ways = []
    more = next((n for n in range(ranks + 1, min(heads, _MOST_RANKS) + 1) if tokens_on(n) >= length), None)
    if more is not None:
        ways.append(f"--tp {more}")
    if plain and tokens_on(ranks, fp8_weights=True) >= length:
        ways.append("--quantization fp8")
    if tokens_on(ranks, fp8_kv=True) >= length:
        ways.append("--kv-cache-dtype fp8")
    if tokens:
        ways.append(f"--max-model-len {tokens}")
    return f"it fits with {' or '.join(ways)}" if ways else "nothing that this command knows makes it fit"


def _gib(size: int) -> str:
    return f"{size / 2**30:8.1f} GiB"
