"""Policies by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from core_sim import WEIGHTS

from leadline.engine.config import EngineConfig
from leadline.engine.core import (
    LengthAwareEviction,
    LRUEviction,
    SchedulerConfig,
    WeightedPolicy,
    build_scheduler,
    plugins,
)
from leadline.engine.core.plugins import load_eviction_policy, load_scheduling_policy
from leadline.engine.errors import ConfigError


def test_the_policies_of_this_package_are_known_by_name() -> None:
    assert isinstance(load_eviction_policy("lru"), LRUEviction)
    assert isinstance(load_eviction_policy("length-aware"), LengthAwareEviction)
    assert isinstance(load_scheduling_policy("weighted", WEIGHTS), WeightedPolicy)


def test_the_policies_of_this_package_need_no_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    test_the_policies_of_this_package_are_known_by_name()
    test_an_unknown_policy_is_refused_with_the_known_names()


def test_pyproject_registers_the_policies_that_are_known_without_it() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for group, policies in plugins._BUILT_IN.items():
        assert project["entry-points"][group] == policies


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"'lfu' is unknown; known: .*length-aware, lru"):
        load_eviction_policy("lfu")
    with pytest.raises(ConfigError, match=r"'fifo' is unknown; known: .*weighted"):
        load_scheduling_policy("fifo", WEIGHTS)


def test_a_scheduler_is_built_from_the_engines_settings() -> None:
    config = EngineConfig(model="m", block_size=16, max_concurrent_requests=3, eviction_policy="length-aware")
    scheduler = build_scheduler(config, num_blocks=10, max_model_len=100)
    assert scheduler.pool.num_blocks == 10
    assert (scheduler.config.block_size, scheduler.config.max_concurrent_requests) == (16, 3)
    assert scheduler.config.model == "m"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_model_len", 0), ("prefill_chunk", 0), ("max_queued_requests", -1), ("max_num_batched_tokens", 4)],
)
def test_settings_that_cannot_work_are_named(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=setting):
        SchedulerConfig(**{"max_model_len": 100, setting: value})
