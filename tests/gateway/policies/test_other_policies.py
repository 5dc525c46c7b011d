"""least-load, random, session, and finding policies by name."""

from collections import Counter
from importlib.metadata import entry_points

import pytest
from routing_helpers import reported

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import (
    GROUP,
    PolicyError,
    RouteRequest,
    known_policies,
    load_policy,
    matched_tokens,
)
from leadline.gateway.policies.least_load import LeastLoadPolicy
from leadline.gateway.policies.random_choice import RandomPolicy
from leadline.gateway.policies.session import SessionPolicy


def request(**fields: object) -> RouteRequest:
    return RouteRequest(**{"now": 0.0, "prompt_tokens": 100, **fields})


def fleet(size: int) -> list[Pod]:
    return [reported(f"p{number}") for number in range(size)]


def test_least_load_picks_the_fewest_requests() -> None:
    pods = [reported("a", running=3), reported("b", running=1, waiting=1), reported("c", running=4)]
    assert LeastLoadPolicy(seed=1).pick(request(), pods).pod.id == "b"
    pods[1].lease(prefill_tokens=1, blocks=1, now=0)
    pods[1].lease(prefill_tokens=1, blocks=1, now=0)
    assert LeastLoadPolicy(seed=1).pick(request(), pods).pod.id == "a"


@pytest.mark.parametrize("policy", [LeastLoadPolicy(seed=2), RandomPolicy(seed=2)], ids=lambda p: p.name)
def test_equal_pods_are_picked_equally_often(policy: LeastLoadPolicy | RandomPolicy) -> None:
    counts = Counter(policy.pick(request(), fleet(4)).pod.id for _ in range(2_000))
    assert all(400 < counts[f"p{number}"] < 600 for number in range(4))


def test_a_session_stays_on_its_pod_and_sessions_spread() -> None:
    policy, pods = SessionPolicy(seed=1), fleet(8)
    homes = {name: policy.pick(request(session=name), pods).pod.id for name in map(str, range(800))}
    assert all(policy.pick(request(session=name), pods).pod.id == home for name, home in homes.items())
    assert all(50 < count < 160 for count in Counter(homes.values()).values())


def test_only_the_sessions_of_a_pod_that_left_move() -> None:
    policy, pods = SessionPolicy(seed=1), fleet(8)
    for name in map(str, range(300)):
        before = policy.pick(request(session=name), pods).pod.id
        after = policy.pick(request(session=name), pods[1:]).pod.id
        assert after == before or before == "p0"


def test_one_busy_session_does_not_drown_its_pod() -> None:
    policy, pods = SessionPolicy(bound=1.25, seed=1), fleet(4)
    reasons = set()
    for _ in range(100):
        decision = policy.pick(request(session="busy"), pods)
        reasons.add(decision.reason.split()[1])
        decision.pod.lease(prefill_tokens=1, blocks=1, now=0)
        mean = sum(pod.in_flight for pod in pods) / 4
        assert max(pod.in_flight for pod in pods) <= 1.25 * mean + 1
    assert reasons == {"of", "has"}


def test_requests_without_a_session_avoid_the_busier_of_two() -> None:
    policy = SessionPolicy(seed=1)
    pods = [reported("a", running=50), reported("b")]
    assert {policy.pick(request(), pods).pod.id for _ in range(20)} == {"b"}
    assert policy.pick(request(), pods[:1]).pod.id == "a"


@pytest.mark.parametrize("name", ["prefix", "least-load", "session", "random"])
def test_every_policy_explains_every_pod_and_refuses_an_empty_list(name: str) -> None:
    policy = load_policy(name, seed=1)
    matched = request(session="s", matched_blocks={"p1": 1}, explain=True)
    decision = policy.pick(matched, fleet(3))
    assert decision.policy == name
    assert [score.pod for score in decision.scores] == ["p0", "p1", "p2"]
    assert [score.matched_tokens for score in decision.scores] == [0, 64, 0]
    assert decision.picked.pod == decision.pod.id
    assert decision.reason
    with pytest.raises(ValueError, match="at least one"):
        policy.pick(request(), [])


@pytest.mark.parametrize(
    ("blocks", "prompt", "tokens"), [(0, 100, 0), (1, 100, 64), (2, 128, 127), (9, 100, 99), (1, 0, 0)]
)
def test_matched_tokens_leave_one_to_compute(blocks: int, prompt: int, tokens: int) -> None:
    asked = request(prompt_tokens=prompt, matched_blocks={"a": blocks})
    assert matched_tokens(asked, Pod("a", "a:1")) == tokens


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(PolicyError, match=r"policy 'fastest'; known policies: .*least-load, prefix"):
        load_policy("fastest")


def test_a_bad_parameter_is_refused_with_the_policy_s_name() -> None:
    with pytest.raises(PolicyError, match="'session': bound must be above 1"):
        load_policy("session", bound=1)
    with pytest.raises(PolicyError, match=r"'random'.*colour"):
        load_policy("random", colour="red")


def test_every_entry_point_of_ours_loads() -> None:
    assert {"prefix", "least-load", "session", "random"} <= set(known_policies())
    for point in entry_points(group=GROUP):
        assert callable(point.load().pick)
