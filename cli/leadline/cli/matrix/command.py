"""Options of `leadline bench matrix`, and the order of its runs.

Of each technique two engines are alive at once and take turns, so that whatever else the machine does hits
both; each round uses fresh prompts, the same for both sides. A first, short round warms up and is thrown
away.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leadline.cli.matrix.techniques import TECHNIQUES, Machine, Technique
from leadline.cli.matrix.workloads import Size, make
from leadline.cli.options import add_engine_options, engine_config
from leadline.engine.errors import ConfigError

if TYPE_CHECKING:
    from leadline.engine import LLM

__all__ = ["add_arguments", "matrix", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="model (default: %(default)s)")
    group = parser.add_argument_group("benchmark settings")
    for name, default, text in (
        ("requests", 8, "requests of a run"),
        ("prompt-tokens", 128, "length of a prompt"),
        ("output-tokens", 32, "length of an answer"),
        ("rounds", 3, "rounds of each technique; medians are shown"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    group.add_argument(
        "--techniques",
        metavar="NAME,...",
        help="some only: " + ", ".join(technique.name for technique in TECHNIQUES),
    )
    group.add_argument("--json", metavar="FILE", help="write the result there as JSON")
    group.add_argument("--plot", metavar="FILE", help="write a plot there, as PNG")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("requests", "prompt_tokens", "output_tokens", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    wanted = None if args.techniques is None else [name.strip() for name in args.techniques.split(",")]
    known = {technique.name for technique in TECHNIQUES}
    if wanted is not None and (unknown := set(wanted) - known):
        raise ConfigError(
            f"--techniques: no such technique: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(known))}"
        )
    config = engine_config(args.model, args)
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings["model"]
    size = Size(args.requests, args.prompt_tokens, args.output_tokens)
    result = matrix(args.model, settings, size, args.rounds, wanted)
    from leadline.cli.matrix.table import markdown, plot

    print(markdown(result), end="")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(result, Path(args.plot))
    return 0


def matrix(
    model: str, settings: dict[str, Any], size: Size, rounds: int, wanted: list[str] | None = None
) -> dict[str, Any]:
    """Measure; see table.py for the shape of the result."""
    machine = Machine.this(settings.get("device", "auto"))
    if machine.gpus and settings.get("num_kv_blocks") is None:
        # Two engines share the GPU, so neither may take what it finds free.
        block = settings["block_size"]
        need = size.requests * (-(-(size.prompt_tokens + size.output_tokens) // block) + 1)
        settings = {**settings, "num_kv_blocks": max(256, 2 * need)}
    result: dict[str, Any] = {
        "model": settings.get("served_name") or Path(model).name,
        "machine": _describe(machine),
        "size": f"{size.requests} requests of {size.prompt_tokens} + {size.output_tokens} tokens",
        "rounds": rounds,
        "techniques": {},
    }
    for technique in TECHNIQUES:
        if wanted is not None and technique.name not in wanted:
            continue
        why = technique.cannot_run(machine)
        if why is not None:
            result["techniques"][technique.name] = {"workload": technique.workload, "not_run": why}
            continue
        print(f"{technique.name} …", file=sys.stderr, flush=True)
        try:
            entry = _compare(model, settings, technique, size, rounds)
        except ConfigError as error:
            entry = {"not_run": str(error)}
        result["techniques"][technique.name] = {"workload": technique.workload, **entry}
    print("make-up of a request's latency …", file=sys.stderr, flush=True)
    result["makeup"] = _make_up(model, settings, size)
    return result


def _compare(
    model: str, settings: dict[str, Any], technique: Technique, size: Size, rounds: int
) -> dict[str, Any]:
    from leadline.cli.matrix.measure import run_work

    engines: dict[str, LLM] = {}
    try:
        for side, changes in (("off", technique.off), ("on", technique.on)):
            engines[side] = _engine(model, {**settings, **changes})
        seen: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
        for number in range(rounds + 1):
            for side in ("off", "on") if number % 2 else ("on", "off"):
                llm = engines[side]
                work = make(technique.workload, size, llm.core.model_config.vocab_size, number)
                run = run_work(llm, work)
                if number:  # the first warms up
                    seen[side].append(run.numbers())
        sides: dict[str, Any] = {
            side: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for side, runs in seen.items()
        }
        stats = engines["on"].core.stats()
        if stats.drafted_tokens_total:
            sides["accepted_share"] = stats.accepted_tokens_total / stats.drafted_tokens_total
        return sides
    finally:
        while engines:
            engines.popitem()[1].close()


def _make_up(model: str, settings: dict[str, Any], size: Size) -> dict[str, float]:
    from leadline.cli.matrix.makeup import make_up
    from leadline.cli.matrix.measure import run_work

    with _engine(model, settings) as llm:
        vocab = llm.core.model_config.vocab_size
        run_work(llm, make("shared prefix", size, vocab, 0))
        return make_up(llm, make("shared prefix", size, vocab, 1)).seconds


def _engine(model: str, settings: dict[str, Any]) -> LLM:
    from leadline.engine import LLM

    return LLM(model, progress=False, **settings)


def _describe(machine: Machine) -> str:
    import torch

    if machine.gpus:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cores = f"{platform.machine()}, {machine.cores} cores"
    return f"CPU ({cores}), torch {torch.__version__}"
