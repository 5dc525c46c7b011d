"""`leadline operator`: turns InferenceServices into engine pods."""

from __future__ import annotations

import argparse
import logging

from leadline.operator.options import add_options

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from leadline.operator.main import run as run_operator
    from leadline.operator.options import settings_of

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return run_operator(settings_of(args))
