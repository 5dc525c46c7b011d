"""`leadline serve MODEL`: one engine behind the OpenAI API."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from leadline.cli.options import add_engine_options, engine_config, lines_of

__all__ = ["add_arguments", "aliases", "run"]

_MOST_API_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="smollm2, hf://org/name[@revision], file:///path, or a path (a folder or a *.gguf file)"
    )
    group = parser.add_argument_group("server settings")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, help="port; 0 picks a free one and prints it (default: %(default)s)"
    )
    group.add_argument(
        "--api-processes",
        type=int,
        metavar="N",
        help="processes that read requests, detokenize and write answers (default: 1 on CPU; on a GPU up to "
        "4, by the CPU cores and the size of the model)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests get to finish after SIGTERM (default: %(default)s)",
    )
    for name, default, text in (
        ("keep-alive", 120, "close a connection that sent no request for so long; proxies must pool shorter"),
        ("request-timeout", 60, "refuse a request that takes longer from its first byte to its last"),
        ("write-timeout", 60, "cut off a client that reads nothing of its answer for so long"),
    ):
        group.add_argument(
            f"--{name}",
            type=float,
            default=float(default),
            metavar="SECONDS",
            help=f"{text} (default: {default})",
        )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="form of a log line (default: %(default)s)",
    )
    group.add_argument(
        "--alias",
        action="append",
        metavar="NAME",
        help="another name that requests may give the model; repeat it for more (environment: "
        "LEADLINE_ALIASES, with commas between)",
    )
    group.add_argument(
        "--tokenizer-info",
        action="store_true",
        help="serve GET /tokenizer_info, which shows special tokens and the chat template",
    )
    group.add_argument(
        "--cors-origins",
        metavar="ORIGIN,...",
        default="",
        help="origins whose pages may call this server from a browser, such as https://app.example; * for "
        "any (default: none)",
    )
    group.add_argument("--access-log", action="store_true", help="log every HTTP request")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with one accepted API key a line; without it no key is needed",
    )
    group.add_argument(
        "--warmup-file",
        type=Path,
        metavar="FILE",
        help="file with one prompt a line to put into the prefix cache before the server reports ready",
    )
    _add_publishing_options(parser)
    add_engine_options(parser)


def _add_publishing_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "publishing settings", "how gateways learn of this engine's cache and load"
    )
    for option, metavar, text in (
        (
            "redis-url",
            "URL",
            "Redis or Valkey to publish to; better given in the environment, for its password",
        ),
        (
            "redis-credentials",
            "FOLDER",
            "files `username` and `password` for Redis, read at each connection",
        ),
        ("service", "NAMESPACE/NAME", "the service that this engine is a pod of"),
        ("pod-name", "NAME", "name of this engine within the service; host name and port when left out"),
        (
            "advertise-address",
            "HOST:PORT",
            "where gateways reach this server; where it listens when left out",
        ),
    ):
        variable = "LEADLINE_" + option.replace("-", "_").upper()
        group.add_argument(f"--{option}", metavar=metavar, help=f"{text} (environment: {variable})")


def _option_or_environment(args: argparse.Namespace, name: str) -> str | None:
    value: str | None = getattr(args, name)
    return value or os.environ.get("LEADLINE_" + name.upper()) or None


def aliases(args: argparse.Namespace) -> tuple[str, ...]:
    """Of the options, else of the environment, in which the operator gives them."""
    names: list[str] = args.alias or os.environ.get("LEADLINE_ALIASES", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def run(args: argparse.Namespace) -> int:
    config = engine_config(args.model, args)
    from leadline.engine.errors import ConfigError
    from leadline.engine.server import ServerSettings, serve
    from leadline.protocol.http.cors import invalid_origin

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must lie between 0 and 65535, not {args.port}")
    if args.api_processes is not None and not 1 <= args.api_processes <= _MOST_API_PROCESSES:
        raise ConfigError(
            f"api_processes must lie between 1 and {_MOST_API_PROCESSES}, not {args.api_processes}"
        )
    if not 0 <= args.drain_timeout < math.inf:
        raise ConfigError(f"drain_timeout must be a number of seconds from 0 on, not {args.drain_timeout:g}")
    for name in ("keep_alive", "request_timeout", "write_timeout"):
        if not 0 < getattr(args, name) < math.inf:
            raise ConfigError(f"{name} must be a number of seconds above 0, not {getattr(args, name):g}")
    origins = tuple(origin.strip() for origin in args.cors_origins.split(",") if origin.strip())
    if (wrong := invalid_origin(origins)) is not None:
        raise ConfigError(f"cors_origins: {wrong!r} is no origin; write scheme://host[:port], or *")
    keys = lines_of(args.api_key_file)
    if args.api_key_file is not None and not keys:
        raise ConfigError(f"api_key_file {str(args.api_key_file)!r} holds no key; write one a line")
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_processes=args.api_processes,
        drain_timeout=args.drain_timeout,
        keep_alive=args.keep_alive,
        request_timeout=args.request_timeout,
        write_timeout=args.write_timeout,
        log_level=args.log_level,
        log_format=args.log_format,
        access_log=args.access_log,
        api_keys=keys,
        aliases=aliases(args),
        tokenizer_info=args.tokenizer_info,
        cors_origins=origins,
        warmup_prompts=lines_of(args.warmup_file),
        redis_url=_option_or_environment(args, "redis_url"),
        redis_credentials=_option_or_environment(args, "redis_credentials"),
        service=_option_or_environment(args, "service"),
        pod_name=_option_or_environment(args, "pod_name"),
        advertise_address=_option_or_environment(args, "advertise_address"),
    )
    return serve(config, settings)
