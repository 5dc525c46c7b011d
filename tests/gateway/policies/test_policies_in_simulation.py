"""The policies over a few simulated pods, with the benchmark's own simulation."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from routing_simulation import simulate


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, float]]:
    return {policy: simulate(policy, pods=12, seconds=30) for policy in ("prefix", "session", "random")}


def test_prefix_routing_finds_most_of_what_can_be_found(runs: dict[str, dict[str, float]]) -> None:
    assert runs["prefix"]["hit rate"] > 0.9
    assert runs["prefix"]["hit rate"] > runs["random"]["hit rate"] + 0.15


def test_prefix_routing_answers_sooner_than_session_and_random(runs: dict[str, dict[str, float]]) -> None:
    assert runs["prefix"]["TTFT p50"] < runs["session"]["TTFT p50"] / 2
    assert runs["prefix"]["TTFT p90"] < runs["random"]["TTFT p90"] / 4


def test_prefix_routing_serves_more(runs: dict[str, dict[str, float]]) -> None:
    assert runs["prefix"]["tokens/s"] > 1.2 * runs["random"]["tokens/s"]
