"""Valkey, engines and gateway of one machine: started together, watched, and stopped in order.

    Valkey  a socket in a private folder, a random password
    engine-0 … engine-N   loopback ports, which stay the same over restarts; publish to Valkey
    gateway  the one port for clients; reads Valkey, routes to the engines

The password travels in the children's environment and nowhere else. Stopping goes from the outside in: the
gateway finishes its streams, then the engines have none, then Valkey goes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.cli.launcher.engines import EngineSettings
from leadline.cli.launcher.ports import ReservedPort
from leadline.cli.launcher.supervisor import Supervisor
from leadline.cli.valkey import EmbeddedValkey
from leadline.protocol.errors import LeadlineError

__all__ = ["SERVICE", "LaunchError", "Stack", "StackSettings"]

SERVICE = "local/leadline"
"""In our own Valkey."""
_OURS = ("REDIS_URL", "REDIS_CREDENTIALS", "SERVICE", "POD_NAME", "POD_UID", "ADVERTISE_ADDRESS")
"""Variables (LEADLINE_…) of our own environment that are not for the children."""
_STORED_RESPONSES = 200
"""At most, so that they take 200 MiB of Valkey's memory."""
_VALKEY_CHECK = 0.5
_GRACE = 5.0
"""Seconds on top of the drain time before a child is killed."""


class LaunchError(LeadlineError):
    """A part did not start; the message is its own."""


@dataclass(slots=True, frozen=True)
class StackSettings:
    engines: EngineSettings
    replicas: int
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    policy: str = "prefix"
    workers: int = 1
    keys_file: str = ""
    redis_url: str = ""
    """A Redis to use in place of a Valkey of our own."""
    store_responses: float = 3600.0
    """Seconds for which the gateway stores responses; 0: not at all."""
    drain_timeout: float = 30.0
    """Seconds that streams get to finish."""
    log_level: str = "warning"
    access_log: bool = False


class Stack:
    """`start`, `watch` until it is time, `stop` whatever happened; all in the main thread's event loop."""

    def __init__(self, settings: StackSettings, say: Callable[[str], None]) -> None:
        """`say` takes lines for the user, from any thread. Raises ConfigError when the port is taken."""
        self.settings = settings
        self._say = say
        self._port = ReservedPort(settings.host, settings.port)
        self._engine_ports = [ReservedPort() for _ in range(settings.replicas)]
        self._folder: Path | None = None
        self._valkey: EmbeddedValkey | None = None
        self.engines: list[Supervisor] = []
        self._gateway: Supervisor | None = None
        self._hurry = False

    @property
    def url(self) -> str:
        """For clients."""
        return f"http://{self._port.address}"

    @property
    def service(self) -> str:
        """Its name in Redis: one of our own where others may use the Redis as well, since their engine-0 is
        not ours."""
        if not self.settings.redis_url:
            return SERVICE
        return f"{SERVICE}-{re.sub('[^a-z0-9-]+', '-', socket.gethostname().lower())}-{self._port.port}"

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://{port.address}" for port in self._engine_ports]

    @property
    def served_name(self) -> str:
        return self.settings.engines.served_name

    async def start(self) -> None:
        """Returns when all take requests. Raises LaunchError, ValkeyError, ConfigError; call `stop` then."""
        await self.start_engines(gateway=True)

    async def start_engines(self, *, gateway: bool = False) -> None:
        """Valkey and engines, and the gateway at the same time if wanted."""
        if not self.settings.redis_url:
            self._valkey = EmbeddedValkey.start()
            self._say(f"valkey: ready (pid {self._valkey.pid}, {self._valkey.address})")
        ports = [port.port for port in self._engine_ports]
        commands = self.settings.engines.commands(ports, self.settings.log_level)
        for number, (command, additions) in enumerate(commands):
            name = f"engine-{number}"
            command = [*command, f"--drain-timeout={self.settings.drain_timeout}"]
            environment = self._environment() | additions
            environment |= {"LEADLINE_SERVICE": self.service, "LEADLINE_POD_NAME": name}
            supervisor = Supervisor(
                *(name, command, environment, "127.0.0.1", ports[number]),
                say=self._say,
                quiet=lambda line: line.startswith("Leadline serving "),
            )
            self.engines.append(supervisor)
            supervisor.start()
        if gateway:
            self._gateway = self._make_gateway(self.settings.policy)
            self._gateway.start()
        await _all_ready([*self.engines, *([self._gateway] if self._gateway else [])])

    async def start_gateway(self, policy: str) -> None:
        """A gateway with another policy in front of the engines that run. Raises LaunchError."""
        await self.stop_gateway()
        self._gateway = self._make_gateway(policy)
        self._gateway.start()
        await _all_ready([self._gateway])

    async def stop_gateway(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.stop(self.settings.drain_timeout + _GRACE)

    async def watch(self, until: asyncio.Event) -> None:
        """Keep everything running until `until` is set. The supervisors do so; Valkey is checked here."""
        while not until.is_set():
            try:
                async with asyncio.timeout(_VALKEY_CHECK):
                    await until.wait()
            except TimeoutError:
                if self._valkey is not None and not self._valkey.running:
                    self._revive(self._valkey)

    async def stop(self) -> None:
        """From the outside in. Returns when nothing is left; may be called again."""
        patience = self.settings.drain_timeout + _GRACE
        if self._gateway is not None and not self._hurry:
            await self._gateway.stop(patience)
        parts = [*self.engines, *([self._gateway] if self._gateway else [])]
        await asyncio.gather(*(part.stop(0.0 if self._hurry else patience) for part in parts))
        if self._valkey is not None:
            self._valkey.stop()
        for port in (self._port, *self._engine_ports):
            port.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def hurry(self) -> None:
        """Let `stop`, also one in progress, wait for nothing."""
        self._hurry = True
        for part in (*self.engines, *([self._gateway] if self._gateway else [])):
            part.kill()

    # -- inside ----------------------------------------------------------------------------------------------

    def _make_gateway(self, policy: str) -> Supervisor:
        command = [
            *(sys.executable, "-m", "leadline.cli.main", "gateway"),
            *("--config", str(self._gateway_config(policy)), f"--log-level={self.settings.log_level}"),
        ]
        host, port = self.settings.host, self._port.port
        return Supervisor(
            *("gateway", command, self._environment(), host, port),
            say=self._say,
            quiet=lambda line: line.startswith("Leadline gateway at "),
        )

    def _gateway_config(self, policy: str) -> Path:
        """A file with the gateway's settings. No secret is in it."""
        settings = self.settings
        pods = [
            {"id": f"engine-{number}", "address": port.address}
            for number, port in enumerate(self._engine_ports)
        ]
        document: dict[str, Any] = {
            "policy": policy,
            "keys_file": os.path.abspath(settings.keys_file) if settings.keys_file else "",
            "server": {
                "host": settings.host,
                "port": self._port.port,
                "workers": settings.workers,
                "access_log": settings.access_log,
                "shutdown_seconds": settings.drain_timeout,
            },
            "responses": {
                "store_seconds": settings.store_responses,
                "max_per_tenant": _STORED_RESPONSES,
            },
            "services": [
                {
                    "name": self.service,
                    "model": str(settings.engines.folder),
                    "served_names": [settings.engines.served_name],
                    "pods": pods,
                }
            ],
        }
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="leadline-up-"))
        path = self._folder / "gateway.json"
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        return path

    def _environment(self) -> dict[str, str]:
        ours = {f"LEADLINE_{name}" for name in _OURS}
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        url = self.settings.redis_url or (self._valkey.url if self._valkey is not None else "")
        return environment | {"LEADLINE_REDIS_URL": url, "PYTHONUNBUFFERED": "1"}

    def _revive(self, valkey: EmbeddedValkey) -> None:
        """Under the same URL and empty: engines and gateway come back to it by themselves."""
        try:
            valkey.restart()
        except (LeadlineError, OSError) as error:
            self._say(f"valkey ended and does not start again: {error}")
        else:
            self._say(f"valkey ended; started again, empty (pid {valkey.pid}, {valkey.address})")


async def _all_ready(supervisors: list[Supervisor]) -> None:
    """Raises LaunchError as soon as one is given up."""
    failures = [supervisor.failed for supervisor in supervisors]
    ready: asyncio.Future[Any] = asyncio.gather(*(supervisor.ready.wait() for supervisor in supervisors))
    ends: list[asyncio.Future[Any]] = [ready, *failures]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                raise LaunchError(failure.result())
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
