"""Expected seconds to first token, term by term, and what becomes of ties and herds."""

from collections import Counter

import pytest
from routing_helpers import report, reported

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod, eligible
from leadline.gateway.policies.base import RouteRequest
from leadline.gateway.policies.prefix import PrefixPolicy

EXACT = {"decode_weight": 0.0, "tie_relative": 0.0, "tie_seconds": 0.0, "seed": 1}


def request(prompt: int = 6_400, **fields: object) -> RouteRequest:
    return RouteRequest(**{"now": 0.0, "prompt_tokens": prompt, "explain": True, **fields})


# fields of pods a and b, matched blocks, the winner and its expected seconds
TABLE = [
    pytest.param({}, {}, {"b": 50}, "b", 0.32, id="a match halves the prefill"),
    pytest.param({"queued_prefill_tokens": 4_000}, {}, {"a": 50}, "b", 0.64, id="a queue outweighs a match"),
    pytest.param(
        {"queued_prefill_tokens": 3_000}, {}, {"a": 50}, "a", 0.62, id="a match outweighs a shorter queue"
    ),
    pytest.param({"prefill_tokens_per_second": 40_000.0}, {}, {"b": 50}, "a", 0.16, id="a faster pod wins"),
    pytest.param({}, {}, {"a": 100, "b": 99}, "a", 0.0001, id="the last token is always computed"),
    pytest.param({}, {"free_blocks": 10}, {"b": 90}, "b", 0.064, id="enough blocks are free for the rest"),
    pytest.param(
        {}, {"free_blocks": 0}, {"b": 50}, "b", 0.32 + 50 * 5.12 / 1_000, id="a short wait is worth it"
    ),
    pytest.param(
        {}, {"free_blocks": 0, "decode_step_seconds": 0.2}, {"b": 50}, "a", 0.64, id="a long wait is not"
    ),
    pytest.param(
        {"prefill_tokens_per_second": 0.0}, {}, {"a": 50}, "a", 0.32, id="an unmeasured pod is like its peers"
    ),
]


@pytest.mark.parametrize(("a", "b", "matched", "winner", "seconds"), TABLE)
def test_the_soonest_pod_is_picked(a: dict, b: dict, matched: dict, winner: str, seconds: float) -> None:
    pods = [reported("a", **a), reported("b", **b)]
    decision = PrefixPolicy(**EXACT).pick(request(matched_blocks=matched), pods)
    assert decision.pod.id == winner
    assert decision.picked.seconds == pytest.approx(seconds)


def test_the_explanation_adds_up_for_every_pod() -> None:
    pods = [reported("a", queued_prefill_tokens=500, running=3), reported("b", free_blocks=0)]
    decision = PrefixPolicy(seed=1).pick(request(matched_blocks={"a": 10}), pods)
    assert [score.pod for score in decision.scores] == ["a", "b"]
    for score in decision.scores:
        parts = (score.queue_seconds, score.prefill_seconds, score.block_wait_seconds, score.decode_seconds)
        assert score.seconds == pytest.approx(sum(parts))
    assert decision.scores[0].matched_tokens == 640
    assert decision.scores[0].queue_seconds == pytest.approx(0.05)
    assert decision.scores[0].prefill_seconds == pytest.approx(0.576)
    assert decision.scores[1].block_wait_seconds > 0
    assert decision.picked in decision.scores


def test_without_explain_only_the_picked_pod_is_scored() -> None:
    decision = PrefixPolicy(seed=1).pick(request(explain=False), [reported("a"), reported("b")])
    assert decision.scores == ()
    assert decision.picked.pod == decision.pod.id


def test_equal_prompts_lean_to_the_pod_with_fewer_streams() -> None:
    policy = PrefixPolicy(seed=1, tie_relative=0, tie_seconds=0)
    assert policy.pick(request(), [reported("a", running=30), reported("b")]).pod.id == "b"


def test_a_short_output_counts_less_than_a_long_one() -> None:
    policy = PrefixPolicy(seed=1)
    pods = [reported("a", running=30)]
    short = policy.pick(request(max_tokens=1), pods).picked.decode_seconds
    long = policy.pick(request(max_tokens=None), pods).picked.decode_seconds
    assert 0 < short < long / 100


def test_near_ties_spread_evenly() -> None:  # P20
    policy = PrefixPolicy(seed=5)
    pods = [reported(f"p{number}") for number in range(8)]
    counts = Counter(policy.pick(request(), pods).pod.id for _ in range(4_000))
    # 500 each; 5 standard deviations are 105.
    assert min(counts.values()) > 395
    assert max(counts.values()) < 605
    assert len(counts) == 8


def test_a_clear_loser_gets_nothing_of_the_spread() -> None:
    policy = PrefixPolicy(seed=5)
    pods = [reported("a"), reported("b"), reported("c", queued_prefill_tokens=2_000)]
    assert {policy.pick(request(), pods).pod.id for _ in range(200)} == {"a", "b"}


def test_the_same_seed_picks_the_same_pods() -> None:
    pods = [reported(f"p{number}") for number in range(8)]
    first, second = PrefixPolicy(seed=9), PrefixPolicy(seed=9)
    assert [first.pick(request(), pods).pod.id for _ in range(50)] == [
        second.pick(request(), pods).pod.id for _ in range(50)
    ]


def test_a_herd_of_identical_prompts_is_spread_by_the_load_it_makes() -> None:  # P20
    index = ServiceIndex(seed=1)
    index.heard(0)
    pods = [reported(f"p{number}", epoch=f"e{number}") for number in range(4)]
    for pod in pods:
        index.pod_seen(pod.id, pod.epoch)
    policy = PrefixPolicy(seed=3)
    chain = list(range(1, 101))
    leases = []
    for _ in range(200):
        matched = index.match(chain, 0)
        decision = policy.pick(request(matched_blocks=matched), eligible(pods, 0))
        pod = decision.pod
        leases.append(pod.lease(prefill_tokens=6_400 - decision.picked.matched_tokens, blocks=100, now=0))
        index.routed(pod.id, chain, matched.get(pod.id, 0), 0)
    counts = sorted(pod.in_flight for pod in pods)
    assert counts[0] > 25, counts
    assert counts[-1] < 75, counts
    for lease in leases:
        lease.close()
    assert all(pod.in_flight == 0 for pod in pods)


def test_a_warm_pod_takes_the_herd_while_it_is_soonest() -> None:
    pods = [reported("warm"), reported("cold")]
    policy = PrefixPolicy(seed=3)
    for _ in range(10):
        decision = policy.pick(request(matched_blocks={"warm": 99}), pods)
        assert decision.pod.id == "warm"
        decision.pod.lease(prefill_tokens=64, blocks=4, now=0)


def test_a_restarted_pod_is_not_routed_to_for_its_old_blocks() -> None:  # P19
    index = ServiceIndex(seed=1)
    index.heard(0)
    pods = [reported("a"), reported("b", epoch="e2")]
    chain = list(range(100))
    for pod in pods:
        index.pod_seen(pod.id, pod.epoch)
    index.routed("a", chain, 0, 0)
    policy = PrefixPolicy(**EXACT)
    assert policy.pick(request(matched_blocks=index.match(chain, 0)), pods).picked.matched_tokens > 0
    pods[0].heartbeat(report("a", time=1, epoch="e1-restarted"), 1)
    index.pod_seen("a", "e1-restarted")
    decision = policy.pick(request(now=1.0, matched_blocks=index.match(chain, 1)), pods)
    assert [score.matched_tokens for score in decision.scores] == [0, 0]


def test_pods_that_never_reported_are_routed_by_what_is_in_flight() -> None:
    pods = [Pod("a", "a:1"), Pod("b", "b:1")]
    pods[0].lease(prefill_tokens=6_400, blocks=100, now=0)
    assert PrefixPolicy(seed=1).pick(request(), pods).pod.id == "b"


@pytest.mark.parametrize("parameters", [{"knee": 0}, {"tie_seconds": -1}, {"default_prefill_rate": 0}])
def test_senseless_parameters_are_refused(parameters: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        PrefixPolicy(**parameters)
