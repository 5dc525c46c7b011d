"""Clients leave no processes behind, whether they end by themselves or take too long."""

from __future__ import annotations

import os
from pathlib import Path

import dialogue
import psutil
import pytest
from command_lines import Command, Task
from dialogue import Dialogues

from running_up import until


def nothing(pod: str) -> None:
    pass


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("last", "ended"), [("true", ""), ("wait", "killed after 0.5 s")])
def test_what_a_client_has_started_ends_with_it(
    last: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue, "_SECONDS", 0.5)
    script = ["sh", "-c", f"sleep 600 & echo $!; {last}"]
    commands = [
        Command((Task(client, "", tmp_path, ""),), script, {"PATH": os.environ["PATH"]})
        for client in ("one", "two")
    ]
    outcomes = Dialogues("", nothing).run(commands)
    for client in ("one", "two"):
        child, *rest = outcomes[client].printed.splitlines()
        assert "".join(rest) == ended
        until(lambda pid=int(child): is_gone(pid), 10, f"the end of {child}")
