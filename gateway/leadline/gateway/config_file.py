"""From a YAML or JSON file, and the command-line options that go over it, to a checked GatewayConfig.

Room: gateway. Owns the merge, the short form of a pod (its address alone), and that the path of the field at
fault numbers the items of lists.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.gateway.config import GatewayConfig, PodConfig, ServiceConfig
from leadline.gateway.documents import convert, read_document
from leadline.gateway.errors import ConfigError

__all__ = ["read_config"]


def read_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """The settings of a file (None: all defaults) with `overrides` put over them.

    `overrides` is a nested mapping of the file's shape, such as the command line makes; a mapping in it is
    merged, anything else replaces. Raises ConfigError naming file and field.
    """
    document = read_document(path) if path else {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, not {type(document).__name__}")
    where = f"{path}: " if path else ""
    try:
        return _convert(_merged(document, overrides or {})).validate()
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


# -- inside --------------------------------------------------------------------------------------------------


def _merged(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in over.items():
        held = result.get(name)
        both = isinstance(held, dict) and isinstance(value, Mapping)
        result[name] = _merged(held, value) if both else value  # type: ignore[arg-type]
    return result


def _convert(document: dict[str, Any]) -> GatewayConfig:
    # msgspec's paths do not number list items, so those are converted one by one.
    services = document.get("services") or []
    if not isinstance(services, list):
        raise ConfigError("services: must be a list")
    config = convert({**document, "services": []}, GatewayConfig, "")
    config.services = [_service(entry, f"services[{number}]") for number, entry in enumerate(services)]
    return config


def _service(entry: object, path: str) -> ServiceConfig:
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: must be a mapping with a name, not {type(entry).__name__}")
    pods = entry.get("pods") or []
    if not isinstance(pods, list):
        raise ConfigError(f"{path}.pods: must be a list of addresses")
    service = convert({**entry, "pods": []}, ServiceConfig, path)
    service.pods = [_pod(pod, f"{path}.pods[{number}]") for number, pod in enumerate(pods)]
    return service


def _pod(entry: object, path: str) -> PodConfig:
    return PodConfig(address=entry) if isinstance(entry, str) else convert(entry, PodConfig, path)
