"""All of Leadline on this machine: a private Valkey, engines and the gateway as child processes.

    ports      a port that stays reserved while its process is restarted
    child      one child process: its output, its error, its end
    supervisor     keeps one child running: readiness, restarts with growing pauses
    engines    the command line of each engine; threads and GPUs shared out
    stack      the whole, started, watched and stopped in order

`leadline up` and `leadline bench routing` are made of these. They talk to the children by command line,
environment, HTTP and signals only.
"""

from __future__ import annotations

from leadline.cli.launcher.engines import EngineSettings
from leadline.cli.launcher.stack import LaunchError, Stack, StackSettings

__all__ = ["EngineSettings", "LaunchError", "Stack", "StackSettings"]
