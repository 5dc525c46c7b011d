"""Options of `leadline bench routing`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path

from leadline.cli.options import add_engine_options
from leadline.cli.routing.conversations import Workload
from leadline.engine.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="model (default: %(default)s)")
    group = parser.add_argument_group("benchmark settings")
    group.add_argument(
        "--replicas", type=int, default=3, metavar="N", help="engines to run (default: %(default)s)"
    )
    group.add_argument(
        "--policies",
        default="random,prefix",
        metavar="NAME,...",
        help="routing policies, the first is what the others are compared with (default: %(default)s)",
    )
    group.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="times each policy runs (default: %(default)s)"
    )
    defaults = Workload()
    for name, text in (
        ("systems", "system prompts"),
        ("system_words", "words in each system prompt"),
        ("conversations", "conversations a run"),
        ("turns", "turns of a conversation"),
        ("user_words", "words of each question"),
        ("output_tokens", "tokens of each answer"),
        ("clients", "conversations held at the same time"),
    ):
        option = f"--{name.replace('_', '-')}"
        default = getattr(defaults, name)
        group.add_argument(
            option, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--think-seconds",
        type=float,
        default=defaults.think_seconds,
        metavar="X",
        help="mean pause of a client before each turn, drawn evenly from nothing to twice of it (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--warm-up",
        type=int,
        default=0,
        metavar="N",
        help="conversations of two turns to hold first, which are not counted (default: %(default)s)",
    )
    group.add_argument(
        "--workload-seed", type=int, default=0, metavar="N", help="of the conversations (default: 0)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all results there as one object")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from leadline.cli.launcher import EngineSettings, StackSettings
    from leadline.cli.routing.measure import measure
    from leadline.cli.routing.table import show

    numbers = [field.name for field in dataclasses.fields(Workload) if field.name != "seed"]
    for name in (*numbers, "replicas", "rounds", "warm_up"):
        least = 0 if name in ("think_seconds", "warm_up") else 1
        if getattr(args, name) < least:
            raise ConfigError(f"{name} must be at least {least}, not {getattr(args, name)}")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if not policies or len(set(policies)) < len(policies):
        raise ConfigError("policies must be different names with commas between them, such as random,prefix")
    workload = Workload(**{name: getattr(args, name) for name in numbers}, seed=args.workload_seed)
    settings = StackSettings(
        engines=EngineSettings.of(args.model, args), replicas=args.replicas, port=0, drain_timeout=2.0
    )
    result = asyncio.run(measure(settings, workload, policies, args.rounds, args.warm_up))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return 0 if not any(row["failed"] for row in result["policies"].values()) else 1
