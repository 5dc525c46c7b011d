"""`leadline bench routing`: its workload, and one small run with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leadline.cli.routing.ceiling import Beginnings
from leadline.cli.routing.conversations import Workload
from leadline.cli.routing.own_time import mean_seconds

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


def test_pauses_change_when_is_asked_and_not_what() -> None:
    steady, paused = Workload().make(), Workload(think_seconds=2.0).make()
    assert [one.questions for one in steady] == [one.questions for one in paused]
    assert {pause for one in steady for pause in one.pauses} == {0.0}
    drawn = [pause for one in paused for pause in one.pauses]
    assert 0.0 <= min(drawn) < 1.0 < 3.0 < max(drawn) <= 4.0


def test_a_beginning_is_known_by_full_blocks_that_were_added_before() -> None:
    seen = Beginnings(block_size=4)
    seen.add([*range(10)])
    assert seen.known([*range(10)]) == 8
    assert seen.known([*range(7)]) == 4
    assert seen.known([*range(4), 9, 9, 9, 9]) == 4
    assert seen.known([4, 5, 6, 7]) == 0  # the same block behind another beginning
    seen.add([*range(4), 9, 9, 9, 9])
    assert seen.known([*range(4), 9, 9, 9, 9, 1]) == 8


def test_the_gateways_own_time_is_what_it_saw_beyond_the_engines_and_its_queue() -> None:
    before = {"gateway": (10.0, 100.0), "routing": (1.0, 101.0), "queue": (0.5, 7.0), "engine": (9.0, 100.0)}
    after = {"gateway": (12.0, 110.0), "routing": (1.1, 111.0), "queue": (0.7, 9.0), "engine": (10.5, 110.0)}
    nothing = dict.fromkeys(before, (0.0, 0.0))
    means = mean_seconds([(before, after), (nothing, nothing)])
    assert means == pytest.approx(
        {"gateway": 0.2, "routing": 0.01, "queue": 0.02, "engine": 0.15, "gateway_own": 0.03}
    )


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--turns=0", "turns must be at least 1, not 0"),
        ("--warm-up=-1", "warm_up must be at least 0, not -1"),
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
    result = bench(*SMALL, "--warm-up=2", f"--json={path}")
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert list(found["policies"]) == ["random", "prefix"]
    for name, row in found["policies"].items():
        assert row["requests"] == 10
        assert row["failed"] == 0
        assert sum(row["requests_by_pod"].values()) == 10
        assert set(row["requests_by_pod"]) <= {"engine-0", "engine-1"}
        # Caches are emptied in between, and no request hits what was never sent.
        assert 0 < row["hit_rate"] <= found["ceiling_hit_rate"] + 0.02
        assert row["engine_cpu_seconds_per_request"] > 0
        # Each sees a part of what the one before it sees, of all ten requests.
        by = row["mean_ttft_seconds_by"]
        assert 0 < by["engine"] < by["gateway"] < by["client"]
        assert 0 < by["routing"] < by["gateway_own"]
        assert by["client"] == pytest.approx(row["ttft_seconds"]["mean"])
        assert f"\n{name} " in result.stdout
    # Second turns alone are more than that.
    assert found["policies"]["prefix"]["hit_rate"] > 0.5 * found["ceiling_hit_rate"]
