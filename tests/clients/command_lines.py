"""How each client is started: command, environment and settings files, as docs/clients.md tells users.

A client sees no settings of this machine's user: each has a home folder of its own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "smollm2"
CONTEXT = 8192


@dataclass(frozen=True)
class Task:
    """What one client is to do, and by which name the proxy and the script know it."""

    client: str
    url: str
    folder: Path
    prompt: str


@dataclass(frozen=True)
class Command:
    """A process that does the tasks of one client or of several."""

    tasks: tuple[Task, ...]
    argv: list[str]
    environment: dict[str, str]


class CommandLines:
    """Command lines for clients that lie in `clients`; `homes` is an empty folder."""

    def __init__(self, clients: Path, homes: Path) -> None:
        self._clients, self._homes = clients, homes

    def codex(self, task: Task) -> Command:
        home = self._home("codex")
        (home / "config.toml").write_text(
            f'model = "{MODEL}"\n'
            'model_provider = "leadline"\n'
            f"model_context_window = {CONTEXT}\n"
            "check_for_update_on_startup = false\n"
            "analytics.enabled = false\n"
            "[model_providers.leadline]\n"
            'name = "Leadline"\n'
            f'base_url = "{task.url}/v1"\n'
            'wire_api = "responses"\n'
            'env_key = "LEADLINE_API_KEY"\n'
        )
        argv = [
            self._node("codex"),
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
        ]
        environment = {"CODEX_HOME": str(home), "LEADLINE_API_KEY": "key"}
        return Command((task,), [*argv, task.prompt], self._environment(home, environment))

    def claude_code(self, task: Task) -> Command:
        home = self._home("claude-code")
        environment = {
            "ANTHROPIC_BASE_URL": task.url,
            "ANTHROPIC_AUTH_TOKEN": "key",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",  # with less it begins by summing up the conversation
        }
        argv = [self._node("claude"), "--allowedTools=Read,Edit", "--print", task.prompt]
        return Command((task,), argv, self._environment(home, environment))

    def opencode(self, task: Task) -> Command:
        home = self._home("opencode")
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{task.url}/v1", "apiKey": "key"},
            "models": {MODEL: {"limit": {"context": CONTEXT, "output": 1000}}},
        }
        settings = {"provider": {"leadline": provider}, "share": "disabled", "autoupdate": False}
        (home / "opencode.json").write_text(json.dumps(settings))
        environment = {
            "OPENCODE_CONFIG": str(home / "opencode.json"),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        argv = [self._node("opencode"), "run", f"--model=leadline/{MODEL}", task.prompt]
        return Command((task,), argv, self._environment(home, environment))

    def ai_sdk(self, tasks: list[Task]) -> Command:
        """The AI SDK's clients, all in one process."""
        argv = [str(self._clients / "venv" / "bin" / "node"), str(PROGRAMS / "ai_sdk.mjs"), _jobs(tasks)]
        return Command(tuple(tasks), argv, self._environment(self._home("ai_sdk"), {}))

    def python(self, tasks: list[Task]) -> Command:
        """The clients in Python, all in one process."""
        argv = [
            str(self._clients / "venv" / "bin" / "python"),
            str(PROGRAMS / "python_clients.py"),
            _jobs(tasks),
        ]
        return Command(
            tuple(tasks),
            argv,
            self._environment(self._home("python"), {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
        )

    def _home(self, name: str) -> Path:
        home = self._homes / name
        home.mkdir()
        return home

    def _node(self, name: str) -> str:
        return str(self._clients / "node_modules" / ".bin" / name)

    def _environment(self, home: Path, more: dict[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{self._clients / 'venv' / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "NODE_PATH": str(self._clients / "node_modules"),
            "LANG": "C.UTF-8",
            **more,
        }


def _jobs(tasks: list[Task]) -> str:
    return json.dumps(
        [
            {"kind": task.client, "url": task.url, "folder": str(task.folder), "prompt": task.prompt}
            for task in tasks
        ]
    )
