"""Command-line options of `leadline gateway`, as overrides of the configuration file.

The file has all settings. The options are the few that people change by hand, and those that a gateway
without a file needs:

    leadline gateway --service default/qwen --model smollm2 --pod 127.0.0.1:8001 --pod 127.0.0.1:8002
"""

import argparse
import os
from typing import Any

from leadline.gateway.config.file import read_config
from leadline.gateway.config.settings import GatewayConfig
from leadline.gateway.errors import ConfigError

__all__ = ["add_options", "config_of"]

# option, path in the file, type, metavar, help
_OPTIONS: list[tuple[str, tuple[str, ...], type, str, str]] = [
    ("--host", ("server", "host"), str, "ADDRESS", "address to listen on (default: all)"),
    ("--port", ("server", "port"), int, "N", "port to listen on (default: 8080)"),
    ("--metrics-port", ("server", "metrics_port"), int, "N", "separate port for /metrics"),
    ("--workers", ("server", "workers"), int, "N", "processes that share the port (default: 1)"),
    ("--max-body-bytes", ("server", "max_body_bytes"), int, "N", "larger requests are refused with 413"),
    ("--redis-url", ("redis_url",), str, "URL", "Redis or Valkey with cache events; $LEADLINE_REDIS_URL"),
    ("--keys-file", ("keys_file",), str, "FILE", "keys of clients; without it everybody may"),
    (
        "--policy",
        ("policy",),
        str,
        "NAME",
        "routing policy: prefix, least-load, session, random, an entry point",
    ),
    ("--namespace", ("discovery", "namespace"), str, "NAME", "Kubernetes namespace to watch; * for all"),
    ("--pod-concurrency", ("admission", "pod_concurrency"), int, "N", "requests a pod is given at once"),
    ("--max-queued", ("admission", "max_queued"), int, "N", "requests that may wait for a service"),
    ("--queue-timeout", ("admission", "queue_timeout_seconds"), float, "SECONDS", "longest wait for a pod"),
    ("--shutdown-seconds", ("server", "shutdown_seconds"), float, "SECONDS", "how long streams may finish"),
    ("--otlp-endpoint", ("server", "otlp_endpoint"), str, "URL", "OpenTelemetry collector for traces"),
]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the gateway to a subcommand's parser."""
    parser.add_argument("--config", metavar="FILE", help="settings, YAML or JSON; options go over them")
    for option, path, kind, metavar, text in _OPTIONS:
        parser.add_argument(option, dest=_dest(path), type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--kubernetes", action="store_true", help="find services and pods by watching the API server"
    )
    parser.add_argument(
        "--trust-labels",
        action="store_true",
        help="serve any Service with the label serving.leadline.io/service: for clusters without an "
        "operator, since the author of a Service can then take any model name",
    )
    group = parser.add_argument_group("one service, without a file")
    group.add_argument(
        "--service", metavar="NAMESPACE/NAME", help="name it has in Redis (default: default/default)"
    )
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of its model, for the tokenizer; its pods are asked where there is none",
    )
    group.add_argument(
        "--served-name", action="append", metavar="NAME", help="a name for clients; repeatable"
    )
    group.add_argument("--pod", action="append", metavar="[ID=]HOST:PORT", help="one of its pods; repeatable")


def config_of(args: argparse.Namespace) -> GatewayConfig:
    """The settings of the options given. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for _, path, *_ in _OPTIONS:
        value = getattr(args, _dest(path))
        if value is not None:
            place = overrides
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
    if "redis_url" not in overrides and os.environ.get("LEADLINE_REDIS_URL"):
        overrides["redis_url"] = os.environ["LEADLINE_REDIS_URL"]
    if args.kubernetes:
        overrides.setdefault("discovery", {})["kind"] = "kubernetes"
    if args.trust_labels:
        overrides.setdefault("discovery", {})["trust"] = "labels"
    if args.service or args.model or args.served_name or args.pod:
        if args.config:
            raise ConfigError("--service, --model, --served-name and --pod do not go with --config")
        overrides["services"] = [
            {
                "name": args.service or "default/default",
                "model": args.model or "",
                "served_names": args.served_name or [],
                "pods": [_pod(text) for text in args.pod or ()],
            }
        ]
    return read_config(args.config, overrides)


def _pod(text: str) -> dict[str, str]:
    name, equals, address = text.rpartition("=")
    return {"address": address, "id": name if equals else ""}


def _dest(path: tuple[str, ...]) -> str:
    return "gateway_" + "_".join(path)
