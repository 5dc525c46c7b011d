"""The settings file.

`read_config` makes a checked GatewayConfig from a YAML or JSON file and the command-line options that go over
it. `ConfigWatch` checks the file while the gateway runs, so that a bad edit is noticed before the next start;
until then the settings read at the start stay in force.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.gateway.config.documents import convert, read_document
from leadline.gateway.config.settings import GatewayConfig, PodConfig, ServiceConfig
from leadline.gateway.errors import ConfigError

__all__ = ["ConfigFile", "ConfigWatch", "read_config"]


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Where settings come from. Can be sent to another process."""

    path: str
    read: Callable[[], GatewayConfig]
    """Reads and checks the file, with the options of the command line. Raises ConfigError."""


class ConfigWatch:
    """`watch` is a task for the event loop."""

    def __init__(self, file: ConfigFile, show: Callable[[bool], None]) -> None:
        """`show(valid)` is called when the file has changed. Raises ConfigError."""
        self._path, self._read = file.path, file.read
        self._seen = _identity(self._path)
        self._running = self._read()
        self._show = show

    def poll(self) -> None:
        """Check the file if it has changed. Never raises."""
        seen = _identity(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            new = self._read()
        except ConfigError as error:
            self._show(False)
            log.error("settings: keeping those that run, since the file is not valid: %s", error)
            return
        self._show(True)
        if new == self._running:
            log.info("settings: %s is again as it runs", self._path)
        else:
            log.warning("settings: %s has changed; restart the gateway to apply it", self._path)

    async def watch(self, every: float = 2.0) -> None:
        """Poll without end."""
        while True:
            await asyncio.sleep(every)
            self.poll()


def _identity(path: str) -> tuple[int, ...] | None:
    """Differs after each write or replacement; None: the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


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
