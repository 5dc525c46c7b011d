"""`leadline bench routing`: its workload, and one small run with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leadline.cli.conversations import Workload

SMALL = (
    *("--replicas=2", "--rounds=1", "--systems=2", "--system-words=120", "--conversations=5", "--turns=2"),
    *("--user-words=20", "--output-tokens=4", "--clients=2"),
    *("--block-size=16", "--cpu-threads=1", f"--cpu-kv-bytes={128 << 20}", "--max-model-len=1024"),
)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leadline.cli.main", "bench", "routing", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_same_seed_asks_the_same_and_another_asks_something_else() -> None:
    assert Workload(seed=3).make() == Workload(seed=3).make()
    assert Workload(seed=3).make() != Workload(seed=4).make()
    made = Workload(systems=2, conversations=20, turns=3).make()
    assert len(made) == 20
    assert len({conversation.system for conversation in made}) == 2
    questions = [question for conversation in made for question in conversation.questions]
    assert len(set(questions)) == 60


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--turns=0", "turns must be at least 1, not 0"),
        ("--policies=prefix,prefix", "policies must be different names"),
        ("--block-size=5", "block_size must be"),
    ],
)
def test_what_cannot_be_measured_is_one_line(option: str, complaint: str) -> None:
    result = bench(option)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert complaint in line


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_policies_are_compared_on_real_engines(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = bench(*SMALL, f"--json={path}")
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert list(found["policies"]) == ["random", "prefix"]
    for name, row in found["policies"].items():
        assert row["requests"] == 10
        assert row["failed"] == 0
        assert sum(row["requests_by_pod"].values()) == 10
        assert set(row["requests_by_pod"]) <= {"engine-0", "engine-1"}
        # Caches are emptied in between, and nobody hits what was never sent.
        assert 0 < row["hit_rate"] <= found["ceiling_hit_rate"] + 0.02
        assert row["engine_cpu_seconds_per_request"] > 0
        assert f"\n{name} " in result.stdout
    # Second turns alone are more than that.
    assert found["policies"]["prefix"]["hit_rate"] > 0.5 * found["ceiling_hit_rate"]
