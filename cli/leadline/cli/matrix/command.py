"""Options of `leadline bench matrix`, and the order of its runs.

One engine with the settings as given is there all the time and is one side of every technique; the other
side's is made for it. The two take turns, so that whatever else the machine does hits both; each round uses
fresh prompts, the same for both sides. A first, short round warms up and is thrown away.

What can end the process comes last (further ranks that hang take it with them), and the result is written
after each technique: what was measured stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leadline.cli.matrix.budget import Budget
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
        ("rounds", 3, "rounds of each technique, at most; medians are shown"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    group.add_argument(
        "--techniques",
        metavar="NAME,...",
        help="some only: " + ", ".join(technique.name for technique in TECHNIQUES),
    )
    group.add_argument(
        "--seconds",
        type=float,
        metavar="X",
        help="time for all of it: each technique gets a share, does one round whatever it takes, and is left "
        "out when the time is over",
    )
    group.add_argument("--json", metavar="FILE", help="write the result there as JSON, after each technique")
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
    if args.seconds is not None and args.seconds <= 0:
        raise ConfigError("--seconds must be above 0")
    config = engine_config(args.model, args)
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings["model"]
    if "max_concurrent_requests" not in vars(args):
        settings["max_concurrent_requests"] = args.requests  # a CUDA graph without a use takes time

    def save(result: dict[str, Any]) -> None:
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    size = Size(args.requests, args.prompt_tokens, args.output_tokens)
    result = matrix(args.model, settings, size, args.rounds, wanted, seconds=args.seconds, save=save)
    from leadline.cli.matrix.table import markdown, plot

    print(markdown(result), end="")
    if args.plot:
        plot(result, Path(args.plot))
    failed = [name for name, entry in result["techniques"].items() if "failed" in entry]
    return 1 if failed or "failed" in result["makeup"] else 0


def matrix(
    model: str,
    settings: dict[str, Any],
    size: Size,
    rounds: int,
    wanted: list[str] | None = None,
    *,
    seconds: float | None = None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure; see table.py for the shape of the result. `save` gets it again and again, as it grows."""
    machine = Machine.this(settings.get("device", "auto"))
    if machine.gpus and settings.get("num_kv_blocks") is None:
        # Two engines share the GPU, so neither may take what it finds free.
        block = settings["block_size"]
        need = size.requests * (-(-(size.prompt_tokens + size.output_tokens) // block) + 1)
        settings = {**settings, "num_kv_blocks": max(256, 2 * need)}
    if settings.get("overlap") is None:
        settings = {**settings, "overlap": bool(machine.gpus)}
    chosen = [technique for technique in TECHNIQUES if wanted is None or technique.name in wanted]
    techniques: dict[str, dict[str, Any]] = {
        technique.name: {"workload": technique.workload, "not_run": "the run ended before it"}
        for technique in chosen
    }
    result: dict[str, Any] = {
        "model": settings.get("served_name") or Path(model).name,
        "machine": _describe(machine),
        "size": f"{size.requests} requests of {size.prompt_tokens} + {size.output_tokens} tokens",
        "rounds": rounds,
        "techniques": techniques,
        "makeup": {"not_run": "the run ended before it"},
    }
    budget = Budget(seconds, 1 + len(chosen))
    _say("an engine as it is …")
    with _engine(model, settings) as base:
        bench = _Bench(model, settings, base, size, rounds)
        for technique in (one for one in chosen if not one.further_processes):
            techniques[technique.name] = bench.entry(technique, machine, budget)
            save(result)
        budget.end_of_share()
        _say("make-up of a request's latency …")
        result["makeup"] = _tried(bench.make_up)
        save(result)
        for technique in (one for one in chosen if one.further_processes):
            techniques[technique.name] = bench.entry(technique, machine, budget)
            save(result)
    return result


@dataclasses.dataclass(slots=True, frozen=True)
class _Bench:
    model: str
    settings: dict[str, Any]
    base: LLM
    """With these settings."""
    size: Size
    rounds: int

    def entry(self, technique: Technique, machine: Machine, budget: Budget) -> dict[str, Any]:
        """What the result holds of a technique: both sides, or why there are none."""
        ends = budget.end_of_share()
        why = technique.cannot_run(machine) or ("the time was over" if time.monotonic() > ends else None)
        if why is not None:
            return {"workload": technique.workload, "not_run": why}
        _say(f"{technique.name} …")
        return {"workload": technique.workload, **_tried(lambda: self._compare(technique, ends))}

    def _compare(self, technique: Technique, ends: float) -> dict[str, Any]:
        """Rounds until it is `ends`, at least one."""
        from leadline.cli.matrix.measure import run_work

        size = self.size
        if technique.most_requests is not None:
            size = dataclasses.replace(size, requests=min(size.requests, technique.most_requests))
        warm = dataclasses.replace(size, output_tokens=-(-size.output_tokens // 4))
        own: list[LLM] = []
        engines: dict[str, LLM] = {}
        try:
            for side, changes in (("off", technique.off), ("on", technique.on)):
                if all(self.settings[name] == value for name, value in changes.items()):
                    engines[side] = self.base
                else:
                    own.append(_engine(self.model, {**self.settings, **changes}))
                    engines[side] = own[-1]
            self.base.reset_prefix_cache()
            vocab = self.base.core.model_config.vocab_size
            seen: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
            for number in range(self.rounds + 1):
                for side in ("off", "on") if number % 2 else ("on", "off"):
                    seed = f"{technique.name} {number}"
                    work = make(technique.workload, size if number else warm, vocab, seed)
                    run = run_work(engines[side], work)
                    if number:
                        seen[side].append(run.numbers())
                if number and time.monotonic() > ends:
                    break
            entry: dict[str, Any] = {
                side: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                for side, runs in seen.items()
            }
            entry |= {"rounds": len(seen["on"]), "requests": len(work.prompts)}
            stats = engines["on"].core.stats()
            if stats.drafted_tokens_total:
                entry["accepted_share"] = stats.accepted_tokens_total / stats.drafted_tokens_total
            return entry
        finally:
            while own:
                own.pop().close()

    def make_up(self) -> dict[str, float]:
        """Seconds of a request by part."""
        from leadline.cli.matrix.makeup import make_up
        from leadline.cli.matrix.measure import run_work

        self.base.reset_prefix_cache()
        vocab = self.base.core.model_config.vocab_size
        warm, measured, profiled = (
            make("shared prefix", self.size, vocab, f"make-up {number}") for number in range(3)
        )
        run_work(self.base, warm)
        return make_up(self.base, measured, profiled).seconds


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, or why it did not: one that fails must not cost the others."""
    try:
        return measure()
    except ConfigError as error:
        return {"not_run": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _engine(model: str, settings: dict[str, Any]) -> LLM:
    from leadline.engine import LLM

    return LLM(model, progress=False, **settings)


def _describe(machine: Machine) -> str:
    import torch

    if machine.gpus:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cores = f"{platform.machine()}, {machine.cores} cores"
    return f"CPU ({cores}), torch {torch.__version__}"
