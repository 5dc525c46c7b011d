"""`leadline gateway`: the OpenAI API in front of engines, each request to the pod that can answer soonest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from leadline.gateway.config import GatewayConfig
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

    config = config_of(args)
    _find_models(config)
    return serve(config, log_level=args.log_level)


def _find_models(config: GatewayConfig) -> None:
    """Model names → local folders, where the engine is installed beside us: the gateway itself takes folders
    only, and matches by text when it has none."""
    for service in config.services:
        name = service.model
        if not name or service.tokenizer == "approximate" or Path(name).is_dir():
            continue
        try:
            from leadline.engine.errors import LeadlineError
            from leadline.engine.hub import resolve_model
        except ImportError:
            return
        try:
            service.model = str(resolve_model(name, weights=False).path)
        except (LeadlineError, OSError) as error:
            print(f"leadline: no tokenizer for {service.name}: {error}", file=sys.stderr)
