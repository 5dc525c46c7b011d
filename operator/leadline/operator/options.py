"""Command-line options of `leadline operator`, and the settings they make."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from urllib.parse import urlsplit

from leadline.operator.quantities import quantity
from leadline.operator.settings import OperatorSettings
from leadline.protocol.errors import LeadlineError

__all__ = ["add_options", "settings_of"]

_MOST_SECONDS = 86_400
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every option may come from the environment: --gateway-url from LEADLINE_OPERATOR_GATEWAY_URL."""
    parser.epilog = (
        "Options may come from the environment: --gateway-url from LEADLINE_OPERATOR_GATEWAY_URL. "
        "LEADLINE_REDIS_URL is the Redis or Valkey that engines publish to. With LEADLINE_REDIS_ADMIN_URL, "
        "which has the user and password of an administrator, each service gets a user of its own there."
    )
    defaults = OperatorSettings()
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        metavar="NAME",
        help="look for InferenceServices only here; repeatable (default: in all namespaces)",
    )
    parser.add_argument(
        "--own-namespace", metavar="NAME", help="where the operator runs (default: the pod's)"
    )
    for name, metavar, text in (
        ("operator-name", "NAME", "look only at services with the label serving.leadline.io/operator=NAME"),
        ("engine-image", "IMAGE", "image of GPU engines that name none"),
        ("engine-cpu-image", "IMAGE", "image of CPU engines that name none"),
        ("gateway-url", "URL", "base URL of the gateway, for status.url"),
        ("gateway-namespace", "NAME", "where the gateway's pods run (default: the operator's namespace)"),
        ("gateway-labels", "KEY=VALUE,...", "labels of the gateway's pods"),
        (
            "gpu-requests",
            "cpu=N,memory=N",
            "what an engine asks for with each GPU, where its service does not say",
        ),
        ("cpu-requests", "cpu=N,memory=N", "the same of an engine on the CPU, without the model's weights"),
        ("monitoring-namespace", "NAME", "its pods may reach engine pods, for /metrics"),
        ("lease-name", "NAME", "of the Lease that decides which replica acts"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--accelerator", choices=("gpu", "cpu"), help="what services run on that do not say (default: gpu)"
    )
    parser.add_argument(
        "--name-prefix",
        action="append",
        dest="name_prefixes",
        metavar="NAMESPACE=PREFIX",
        help="services of this namespace (*: of all others) may only have names for clients that begin so; "
        "repeatable; {namespace} in PREFIX stands for the namespace",
    )
    parser.add_argument("--no-network-policies", action="store_true", help="let anybody reach engine pods")
    parser.add_argument(
        "--no-leader-election", action="store_true", help="act without a Lease: one replica only"
    )
    for name, kind, text in (
        ("workers", int, "services looked at at once"),
        ("resync-seconds", float, "between complete lists"),
        ("autoscale-seconds", float, "between looks at the load of services with autoscaling"),
        ("lease-seconds", float, "after which a silent leader is replaced"),
        ("port", int, "of /ready and /metrics; 0: none"),
        ("liveness-port", int, "of /health, for a liveness probe; 0: none"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"{text} (default: {default})")


def settings_of(args: argparse.Namespace) -> OperatorSettings:
    """The settings of the options given. Raises LeadlineError for values that cannot work."""
    given: dict[str, object] = {}
    for field in dataclasses.fields(OperatorSettings):
        value = getattr(args, field.name, None)
        variable = f"LEADLINE_OPERATOR_{field.name.upper()}"
        if value is None and (text := os.environ.get(variable, "")):
            try:
                value = _parse(field.name, text)
            except ValueError:
                raise LeadlineError(f"{variable} must be a number, not {text!r}") from None
        if value is not None:
            given[field.name] = _parse(field.name, value) if isinstance(value, str) else value
    if args.namespaces:
        given["namespaces"] = tuple(args.namespaces)
    if args.name_prefixes:
        given["name_prefixes"] = _prefixes(args.name_prefixes)
    if args.no_network_policies:
        given["network_policies"] = False
    if args.no_leader_election:
        given["leader_elect"] = False
    given.setdefault("redis_url", os.environ.get("LEADLINE_REDIS_URL", ""))
    given.setdefault("redis_admin_url", os.environ.get("LEADLINE_REDIS_ADMIN_URL", ""))
    if "own_namespace" not in given and _NAMESPACE_FILE.is_file():
        given["own_namespace"] = _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    settings = OperatorSettings(**given)  # type: ignore[arg-type]
    if settings.accelerator not in ("gpu", "cpu"):
        raise LeadlineError(f"accelerator must be gpu or cpu, not {settings.accelerator!r}")
    if settings.workers < 1:
        raise LeadlineError(f"workers must be at least 1, not {settings.workers}")
    for name, least in (("lease_seconds", 1), ("resync_seconds", 1), ("autoscale_seconds", 0.1)):
        value = getattr(settings, name)
        if not least <= value <= _MOST_SECONDS:
            option = name.replace("_", "-")
            raise LeadlineError(f"{option} must lie between {least} and {_MOST_SECONDS}, not {value:g}")
    for name in ("port", "liveness_port"):
        if not 0 <= (port := getattr(settings, name)) <= 65535:
            raise LeadlineError(f"{name.replace('_', '-')} must lie between 0 and 65535, not {port}")
    if not all(settings.namespaces):
        raise LeadlineError("namespace must not be empty: leave it out to look in all namespaces")
    if (admin := settings.redis_admin_url) and not urlsplit(admin).password:
        raise LeadlineError(
            "LEADLINE_REDIS_ADMIN_URL must hold a password: redis://USER:PASSWORD@HOST:PORT/0"
        )
    url = settings.gateway_url
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise LeadlineError(f"gateway-url must be http://HOST or https://HOST, not {url!r}")
    return settings


def _prefixes(pairs: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in pairs:
        namespace, equals, prefix = text.partition("=")
        if not namespace or not equals or not prefix:
            raise LeadlineError(f"name-prefix must be NAMESPACE=PREFIX, not {text!r}")
        found[namespace] = (*found.get(namespace, ()), prefix)
    return found


def _parse(name: str, text: str) -> object:
    match name:
        case "name_prefixes":
            return _prefixes([part for part in text.split(",") if part])
        case "gateway_labels":
            pairs = [part.partition("=") for part in text.split(",") if part]
            if not pairs or not all(key and equals for key, equals, _ in pairs):
                raise LeadlineError(f"gateway-labels must be KEY=VALUE,..., not {text!r}")
            return {key: value for key, _, value in pairs}
        case "gpu_requests" | "cpu_requests":
            return _requests(name.replace("_", "-"), text)
        case "namespaces":
            return tuple(part for part in text.split(",") if part)
        case "workers" | "port" | "liveness_port":
            return int(text)
        case "resync_seconds" | "lease_seconds" | "autoscale_seconds":
            return float(text)
        case "network_policies" | "leader_elect":
            return text.lower() not in ("0", "false", "no")
        case _:
            return text


def _requests(option: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, amount in pairs:
        try:
            if name not in ("cpu", "memory", "ephemeral-storage") or quantity(amount) < 0:
                raise ValueError(name)
        except ValueError:
            raise LeadlineError(
                f"{option} must be amounts of cpu, memory or ephemeral-storage, such as cpu=500m,memory=2Gi, "
                f"not {text!r}"
            ) from None
    return {name: amount for name, _, amount in pairs}
