"""Real clients do a task through `leadline up --replicas 2`, and the pod of their streams is killed.

The demo model cannot choose tools, so a constraint provider forces its answers. The clients run their own
loops, with their own prompts and tools, all of them at once. The model is a shallow copy of the demo model,
because agents send prompts of thousands of tokens.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients_folder import clients_folder
from command_lines import CommandLines, Task
from dialogue import Dialogues, Outcome
from valid_streams import check_stream

import recorded_tools
from leadline.engine.hub import resolve_model
from running_up import Up, until
from shallow_model import shallow_model

pytestmark = [pytest.mark.timeout(700), pytest.mark.slow]

HERE = Path(__file__).parent
BEFORE = "The station has three platforms.\nThe clock is slow.\n"
AFTER = "The station has four platforms.\nThe clock is slow.\n"
ANSWER = "Now the notes speak of four platforms."
EDIT = {"path": "notes.txt", "old": "three platforms", "new": "four platforms"}

AI_SDK = ["ai_sdk.responses", "ai_sdk.chat", "ai_sdk.messages"]
PYTHON = [
    *("openai_sdk.chat", "openai_sdk.responses", "anthropic_sdk.messages", "agents_sdk.run"),
    *("pydantic_agents.chat", "pydantic_agents.responses", "pydantic_agents.messages"),
    *("langchain_agents.chat", "langchain_agents.responses", "langchain_agents.messages"),
    *("litellm_sdk.chat", "litellm_sdk.messages"),
]
CLIENTS = ["codex", "claude_code", "opencode", *AI_SDK, *PYTHON]


def calls(client: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The two calls of a client's task, by its own tools."""
    file = str(folder / "notes.txt")
    old, new = EDIT["old"], EDIT["new"]
    match client:
        case "codex":
            old_line, new_line = BEFORE.splitlines()[0], AFTER.splitlines()[0]
            patch = (
                f"*** Begin Patch\n*** Update File: notes.txt\n@@\n-{old_line}\n+{new_line}\n*** End Patch"
            )
            apply = f"apply_patch <<'EOF'\n{patch}\nEOF"
            return [("exec_command", {"cmd": "cat notes.txt"}), ("exec_command", {"cmd": apply})]
        case "claude_code":
            edit = {"file_path": file, "old_string": old, "new_string": new}
            return [("Read", {"file_path": file}), ("Edit", edit)]
        case "opencode":
            edit = {"filePath": file, "oldString": old, "newString": new}
            return [("read", {"filePath": file}), ("edit", edit)]
    return [("read_file", {"path": "notes.txt"}), ("edit_file", EDIT)]


def script(client: str, folder: Path) -> list[dict[str, Any]]:
    """The answers that the model is forced to give."""
    (read, given), (edit, change) = calls(client, folder)
    return [
        {"text": "First I read.", "call": {"name": read, "arguments": given}},
        {"text": "The number is wrong, so I correct it.", "call": {"name": edit, "arguments": change}},
        {"text": ANSWER},
    ]


def plugins(folder: Path) -> None:
    """Register the plug-ins of these tests, as an installed distribution does."""
    info = folder / "test_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[leadline.constraint_providers]\nforced-answers = forced_answers:ForcedAnswers\n"
        "[leadline.routing_policies]\nholding-pod = holding_pod:HoldingPod\n"
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each client's folder with its file."""
    root = tmp_path_factory.mktemp("work")
    for client in CLIENTS:
        (root / client).mkdir()
        (root / client / "notes.txt").write_text(BEFORE)
    return root


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Iterator[Up]:
    clients_folder()
    site, answers = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("answers")
    plugins(site)
    for client in CLIENTS:
        (answers / f"{client.replace('.', '-')}.json").write_text(json.dumps(script(client, work / client)))
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(site), str(HERE / "plugin"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        patch.setenv("LEADLINE_FORCED_ANSWERS", str(answers))
        options = ["--replicas=2", "--constraint-provider=forced-answers", "--policy=holding-pod"]
        options += ["--served-name=smollm2", "--max-model-len=8192", f"--cpu-kv-bytes={256 << 20}"]
        model = shallow_model(resolve_model("smollm2", progress=False)).path
        stack = Up(tmp_path_factory.mktemp("up"), *options, model=str(model))
    try:
        yield stack.wait_ready()
    finally:
        stack.clean_up()


@pytest.fixture(scope="module")
def outcomes(up: Up, work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    lines = CommandLines(clients_folder(), tmp_path_factory.mktemp("homes"))
    dialogues = Dialogues(up.url, lambda pod: os.kill(up.pid(pod), signal.SIGKILL))
    with dialogues.proxy as proxy:

        def task(client: str) -> Task:
            name = client.replace(".", "-")
            prompt = f"Correct the number of platforms in notes.txt: there are four. [task:{name}]"
            return Task(client, f"{proxy.url}/{client}", work / client, prompt)

        commands = [
            lines.codex(task("codex")),
            lines.claude_code(task("claude_code")),
            lines.opencode(task("opencode")),
            lines.ai_sdk([task(client) for client in AI_SDK]),
            lines.python([task(client) for client in PYTHON]),
        ]
        yield dialogues.run(commands)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_does_its_task_though_the_pod_of_its_stream_is_killed(
    client: str, outcomes: dict[str, Outcome], work: Path
) -> None:
    outcome = outcomes[client]
    for turn in outcome.turns:
        assert turn.status == 200, turn.data
        check_stream(turn)
    assert len(outcome.turns) == 3, outcome.printed
    edit = outcome.turns[1]
    assert edit.pod == "engine-0"
    assert outcome.cut is not None
    assert outcome.cut < len(edit.data)
    assert ANSWER in outcome.printed
    assert (work / client / "notes.txt").read_text() == AFTER


@pytest.mark.parametrize("client", ["codex", "claude_code", "opencode"])
def test_the_recorded_tools_are_those_that_the_agent_sends(client: str, outcomes: dict[str, Outcome]) -> None:
    """tests/engine/frontend enforces them. LEADLINE_RECORD_TOOLS=1 writes them again, for a new version."""
    sent = recorded_tools.dumped(recorded_tools.reworded(outcomes[client].turns[0].body["tools"]))
    path = recorded_tools.FOLDER / f"{client}.json"
    if os.environ.get("LEADLINE_RECORD_TOOLS"):
        path.write_text(sent)
    assert sent == path.read_text()


def test_all_streams_were_moved_and_the_pod_came_back(outcomes: dict[str, Outcome], up: Up) -> None:
    assert "engine-0 ended (killed by SIGKILL)" in up.log
    moved = until(lambda: _moved(up), 10, "a count")
    assert moved >= len(CLIENTS)
    until(lambda: len(up.lives("engine-0")) > 1, 60, "a restart")


def _moved(up: Up) -> float:
    text = httpx.get(f"{up.url}/metrics").text
    counts = [line for line in text.splitlines() if "migrations_total" in line and 'outcome="moved"' in line]
    return sum(float(line.split()[-1]) for line in counts)
