"""`leadline gateway`: the OpenAI API in front of engines, each request to the pod that can answer soonest."""

from __future__ import annotations

import argparse

from leadline.gateway.options import add_options

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
    from leadline.gateway.main import serve
    from leadline.gateway.options import config_of

    return serve(config_of(args), log_level=args.log_level)
