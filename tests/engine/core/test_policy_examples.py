"""The policies of examples/policies, registered as a user would and run in a scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_sim import EOS, WEIGHTS, Loop, request

from leadline.engine.core import LRUEviction
from leadline.engine.core.build import load_eviction_policy, load_scheduling_policy
from leadline.engine.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples" / "policies"


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution, as far as importlib.metadata can tell, with the README's entry points."""
    toml = (EXAMPLES / "README.md").read_text().split("```toml\n")[1].split("```")[0]
    lines = [line.replace("[project.entry-points.", "[").replace('"', "") for line in toml.splitlines()]
    info = tmp_path / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    broken = [
        "[leadline.eviction_policies]",
        "broken = no_such_module:Policy",
        "incomplete = collections:OrderedDict",
    ]
    text = "\n".join(lines).replace("[leadline.eviction_policies]", "\n".join(broken))
    (info / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))


def fill(loop: Loop) -> None:
    """A mixed load with shared prefixes, stops, preemption and an abort."""
    for i in range(40):
        prompt = [i % 5 + 1] * (4 * (i % 4)) + [i % 39 + 1]
        loop.add(request(f"r{i}", prompt, max_tokens=1 + i % 12, eos_token_ids=(EOS,)))
        if i % 3 == 0:
            loop.step()
    loop.abort("r39")
    loop.run()
    loop.check_exact()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [9, 12, 40])
def test_both_examples_run_in_a_scheduler_and_keep_the_output_exact(num_blocks: int, depth: int) -> None:
    loop = Loop(
        num_blocks,
        depth=depth,
        policy=load_scheduling_policy("shortest-first", WEIGHTS),
        eviction=load_eviction_policy("scan-resistant"),
        max_queued_requests=100,
    )
    fill(loop)


def test_shortest_first_admits_short_prompts_first_but_nobody_waits_for_ever() -> None:
    loop = Loop(400, policy=load_scheduling_policy("shortest-first", WEIGHTS), max_concurrent_requests=1)
    loop.add(request("long", [9] * 100, max_tokens=1))
    for i in range(8):
        loop.add(request(f"short{i}", [i + 1] * 3, max_tokens=1))
    loop.run()
    finished = list(loop.final)
    assert finished.index("short0") < finished.index("long") < finished.index("short7")


def hits_after_scan(eviction) -> int:
    loop = Loop(16, eviction=eviction)
    for name in ("a", "b"):  # asked twice: the second time it is a hit
        loop.add(request(name, [7] * 21, max_tokens=1))
        loop.run()
    for i in range(12):  # one-off prompts, three blocks each
        loop.add(request(f"scan{i}", [i + 10] * 12, max_tokens=1))
        loop.run()
    loop.add(request("again", [7] * 21, max_tokens=1))
    loop.run()
    return loop.final["again"].num_cached_tokens


def test_scan_resistant_keeps_a_prefix_that_lru_loses_to_one_off_prompts() -> None:
    assert hits_after_scan(LRUEviction()) == 0
    assert hits_after_scan(load_eviction_policy("scan-resistant")) == 20


def test_a_policy_that_cannot_be_loaded_is_reported_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"'broken' \(no_such_module:Policy\) cannot be loaded: ModuleNotFoundError"
    ):
        load_eviction_policy("broken")
    with pytest.raises(ConfigError, match=r"'incomplete' .* lacks a method of EvictionPolicy"):
        load_eviction_policy("incomplete")
