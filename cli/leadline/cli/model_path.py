"""`leadline model-path MODEL`: resolve a model (download or convert it if need be) and print where it
lies."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="smollm2, hf://org/name[@revision], file:///path, or a path")
    parser.add_argument("--download-dir", help="folder for downloaded and converted models")


def run(args: argparse.Namespace) -> int:
    from leadline.engine.hub import resolve_model

    print(resolve_model(args.model, download_dir=args.download_dir).path)
    return 0
