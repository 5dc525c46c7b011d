"""`leadline warmup`: put prompts into a running server's prefix cache, so that the first user does not pay
for them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from leadline.cli.http import Server, ServerError
from leadline.cli.options import text_of
from leadline.engine.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="an engine, not a gateway, which has no cache (default: %(default)s)",
    )
    parser.add_argument("--prompt", action="append", default=[], help="a prompt as raw text; may be repeated")
    parser.add_argument(
        "--system",
        action="append",
        default=[],
        help="a system message, put through the chat template; may be repeated",
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="a file with one prompt a line")
    parser.add_argument(
        "--api-key", help="API key of the server (default: the environment variable LEADLINE_API_KEY)"
    )


def run(args: argparse.Namespace) -> int:
    prompts = list(args.prompt)
    if args.file is not None:
        prompts += [line for line in text_of(args.file).splitlines() if line.strip()]
    if not prompts and not args.system:
        raise ConfigError("nothing to warm up: give --prompt, --system or --file")
    server = Server(args.url, api_key=args.api_key or os.environ.get("LEADLINE_API_KEY"))
    try:
        result = _warm(server, prompts, args.system)
    except ServerError as error:
        if error.status != 404:
            raise
        raise ServerError(
            f"{error}; a gateway has no cache: name an engine, or start engines with --warmup-file"
        ) from None
    print(
        f"{result['prompts']} prompts, {result['prompt_tokens']} tokens, of which {result['cached_tokens']} "
        f"were cached already, in {result['seconds']:.1f} s"
    )
    return 0


def _warm(server: Server, prompts: list[str], systems: list[str]) -> Any:
    entries: list[Any] = list(prompts)
    for text in systems:
        # Rendered by the server, whose template it is; without the opening of the answer, which differs per
        # request.
        messages = [{"role": "system", "content": text}]
        body = {"messages": messages, "add_generation_prompt": False}
        entries.append(server.post("/tokenize", body, "tokens")["tokens"])
    return server.post("/admin/warmup", {"prompts": entries}, "seconds")
