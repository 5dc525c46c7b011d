"""Runs the tasks of many clients at once and kills the pod of all streams in the middle of them.

Each client is to read a file and then to edit it. The gate holds every request for the second call until all
clients are there; then all streams run on one pod, and once each has brought some of its answer the pod is
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_lines import Command
from recording_proxy import Exchange, RecordingProxy

__all__ = ["Dialogues", "Outcome", "tool_results"]

_SECONDS = 300.0


@dataclass
class Outcome:
    """What a client left."""

    turns: list[Exchange]
    """Its requests with tools, in order."""
    printed: str
    """What its process wrote to standard output and standard error."""
    cut: int | None
    """Bytes of the second turn's answer that had come when the pod was killed."""


@dataclass
class Dialogues:
    """`run` gives out what became of each client."""

    upstream: str
    kill: Callable[[str], None]
    """Kills a pod by its name."""
    cuts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held: dict[str, Exchange] = {}
        self._expected = 0
        self._gate = asyncio.Event()
        self.proxy = RecordingProxy(self.upstream, self._before, self._during)

    def run(self, commands: list[Command]) -> dict[str, Outcome]:
        """Run all commands at once until each has ended or `_SECONDS` are over. Nothing that they have
        started goes on."""
        self._expected = sum(len(command.tasks) for command in commands)
        printed: dict[str, str] = {}
        until = time.monotonic() + _SECONDS
        with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
            running = []
            for number, command in enumerate(commands):
                log = Path(logs) / str(number)
                process = _started(command, log)
                stack.callback(_end, process)
                running.append((command, process, log))
            for command, process, log in running:
                ended = ""
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    ended = f"\nkilled after {_SECONDS} s"
                    _end(process)
                text = log.read_text(errors="replace") + ended
                printed |= {task.client: text for task in command.tasks}
        return {client: self._outcome(client, text) for client, text in printed.items()}

    def _outcome(self, client: str, printed: str) -> Outcome:
        turns = [exchange for exchange in self.proxy.of(client) if tool_results(exchange.body) is not None]
        return Outcome(turns, printed, self.cuts.get(client))

    async def _before(self, exchange: Exchange) -> None:
        if tool_results(exchange.body) != 1:
            return
        self._held[exchange.client] = exchange
        if len(self._held) == self._expected:
            self._gate.set()
        await asyncio.wait_for(self._gate.wait(), _SECONDS)

    async def _during(self, exchange: Exchange) -> None:
        if self.cuts or exchange is not self._held.get(exchange.client):
            return
        if all(held.data.count(b"data: ") >= 6 for held in self._held.values()):
            self.cuts = {client: len(held.data) for client, held in self._held.items()}
            self.kill(exchange.pod)


def _started(command: Command, log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in `log`."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command.argv,
            env=command.environment,
            cwd=command.tasks[0].folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with all that it has started: agents have servers and shells of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tool_results(body: Any) -> int | None:
    """The number of tool results in a request; None where it brings no tools."""
    if not isinstance(body, dict) or not body.get("tools"):
        return None
    if "input" in body:
        return sum(item.get("type") == "function_call_output" for item in body["input"])
    roles = [message["role"] for message in body["messages"]]
    blocks = json.dumps(body["messages"]).count('"type": "tool_result"')
    return roles.count("tool") + blocks
