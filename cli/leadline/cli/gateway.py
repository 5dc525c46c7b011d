"""`leadline gateway`: the OpenAI API in front of engines, each request to the pod that can answer soonest."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from leadline.gateway.config.options import add_options
from leadline.gateway.config.settings import GatewayConfig

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "hash-key"),
        default="run",
        help="run (the default); or hash-key: make a key for a client and its entry for the keys file",
    )
    parser.add_argument("--key-name", metavar="NAME", default="client", help="hash-key: the key's name")
    add_options(parser)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if args.action == "hash-key":
        return _hash_key(args.key_name)
    from leadline.gateway.config.file import ConfigFile
    from leadline.gateway.config.options import config_of
    from leadline.gateway.main import serve

    config = config_of(args)
    _find_models(config)
    file = ConfigFile(args.config, functools.partial(config_of, args)) if args.config else None
    return serve(config, log_level=args.log_level, file=file)


def _hash_key(name: str) -> int:
    from leadline.gateway.access.keys import key_entry

    key, entry = key_entry(name)
    print("Give this key to the client; it is kept nowhere:", file=sys.stderr)
    print(key)
    print("Put this into the keys file, under `keys:`:", file=sys.stderr)
    print(entry, end="")
    return 0


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
