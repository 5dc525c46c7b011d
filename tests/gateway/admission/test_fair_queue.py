"""Fair order by class and tenant: shares, no starvation, exact counts, under any sequence of operations."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leadline.gateway.admission.fair_queue import FairQueue

CLASSES = {"interactive": 4.0, "batch": 1.0}


def filled(counts: dict[tuple[str, str], int], cost: float = 1.0, **weights: dict[str, float]) -> FairQueue:
    queue: FairQueue = FairQueue(weights.get("classes", CLASSES), weights.get("tenants"))
    for (class_name, tenant), number in counts.items():
        for position in range(number):
            queue.push((class_name, tenant, position), class_name, tenant, cost)
    return queue


def test_classes_share_by_their_weights() -> None:
    queue = filled({("interactive", "a"): 400, ("batch", "b"): 400})
    first = Counter(queue.pop()[0] for _ in range(250))
    assert first["interactive"] == 200
    assert first["batch"] == 50


def test_tenants_of_one_class_share_equally_however_many_requests_they_send() -> None:
    queue = filled({("interactive", "flood"): 1000, ("interactive", "small"): 20})
    first = Counter(queue.pop()[1] for _ in range(40))
    assert first == {"flood": 20, "small": 20}


def test_tenants_share_by_weight() -> None:
    queue = filled(
        {("interactive", "gold"): 300, ("interactive", "plain"): 300}, tenants={"gold": 3.0}, classes={}
    )
    assert Counter(queue.pop()[1] for _ in range(100))["gold"] == 75


def test_a_tenant_with_requests_of_ten_times_the_tokens_gets_a_tenth_of_the_requests() -> None:
    queue: FairQueue = FairQueue()
    for position in range(200):
        queue.push(("long", position), "interactive", "long", 10_000)
        queue.push(("short", position), "interactive", "short", 1_000)
    first = Counter(queue.pop()[0] for _ in range(110))
    assert 9 <= first["long"] <= 11


def test_requests_of_one_tenant_keep_their_order() -> None:
    queue = filled({("batch", "a"): 50})
    assert [queue.pop()[2] for _ in range(50)] == list(range(50))


def test_an_absence_earns_no_credit() -> None:
    queue = filled({("interactive", "a"): 500})
    for _ in range(100):
        queue.pop()
    for position in range(100):
        queue.push(("interactive", "late", position), "interactive", "late", 1.0)
    first = Counter(queue.pop()[1] for _ in range(40))
    assert first == {"a": 20, "late": 20}


def test_leaving_and_coming_back_does_not_clear_a_debt() -> None:
    queue: FairQueue = FairQueue()
    for position in range(20):
        queue.push(("b", position), "c", "b", 1.0)
    queue.push("dear", "c", "a", 10.0)
    taken = []
    while "dear" not in taken:
        taken.append(queue.pop())
    queue.push("again", "c", "a", 1.0)
    following = [queue.pop() for _ in range(9)]
    assert "again" not in following


def test_a_removed_request_is_charged_to_nobody() -> None:
    queue = filled({("interactive", "a"): 100, ("interactive", "b"): 100})
    for position in range(50):
        assert queue.remove(("interactive", "a", position))
    assert Counter(queue.pop()[1] for _ in range(60)) == {"a": 30, "b": 30}


def test_the_longest_queue_for_its_weight_gives_way() -> None:
    queue = filled({("batch", "big"): 30, ("interactive", "other"): 40})
    assert queue.to_shed("interactive", "new") == ("batch", "big", 29)
    assert queue.to_shed("batch", "big") is None, "its own queue is the longest"
    for position in range(25):
        queue.remove(("batch", "big", position))
    assert queue.to_shed("interactive", "new") == ("interactive", "other", 39)


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of pushes, pops and removals, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue = FairQueue(CLASSES, {"t0": 2.0})
        self.waiting: list[tuple[int, str, str]] = []
        self.number = 0
        self.passed_over: Counter = Counter()

    @rule(
        class_name=st.sampled_from(["interactive", "batch", "other"]),
        tenant=st.sampled_from(["t0", "t1", "t2"]),
        cost=st.floats(1, 4),
    )
    def pushes(self, class_name: str, tenant: str, cost: float) -> None:
        item = (self.number, class_name, tenant)
        self.number += 1
        self.queue.push(item, class_name, tenant, cost)
        self.waiting.append(item)

    @rule()
    def pops(self) -> None:
        item = self.queue.pop()
        if not self.waiting:
            assert item is None
            return
        self.waiting.remove(item)
        assert not [one for one in self.waiting if one[1:] == item[1:] and one < item], (
            "order within a tenant"
        )
        heads = {one[1:]: one for one in reversed(self.waiting)}
        for head in heads.values():
            self.passed_over[head] += 1
            # 9 flows, costs within a factor of 4, weights within a factor of 4 and 2: a head waits for a
            # bounded number of others, whatever they do.
            assert self.passed_over[head] <= 400, "starved"

    @rule(data=st.data())
    def removes(self, data: st.DataObject) -> None:
        if self.waiting:
            item = data.draw(st.sampled_from(self.waiting))
            assert self.queue.remove(item)
            assert not self.queue.remove(item)
            self.waiting.remove(item)

    @rule(class_name=st.sampled_from(["interactive", "batch"]), tenant=st.sampled_from(["t0", "t1", "x"]))
    def sheds(self, class_name: str, tenant: str) -> None:
        def load(flow: tuple[str, str], more: int = 0) -> float:
            count = sum(one[1:] == flow for one in self.waiting) + more
            return count / (CLASSES.get(flow[0], 1.0) * {"t0": 2.0}.get(flow[1], 1.0))

        victim = self.queue.to_shed(class_name, tenant)
        loads = {one[1:]: load(one[1:]) for one in self.waiting}
        mine = load((class_name, tenant), 1)
        if max(loads.values(), default=0.0) > mine:
            assert loads[victim[1:]] == max(loads.values())
            assert victim == max(one for one in self.waiting if one[1:] == victim[1:])
        else:
            assert victim is None

    @invariant()
    def counts_are_exact(self) -> None:
        assert len(self.queue) == len(self.waiting)
        for class_name in ("interactive", "batch", "other"):
            assert self.queue.waiting(class_name) == sum(one[1] == class_name for one in self.waiting)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(1, 100)), min_size=50, max_size=300))
def test_backlogged_tenants_never_differ_by_more_than_their_longest_requests(
    requests: list[tuple[int, float]],
) -> None:
    """The paper's bound while both are backlogged: |W_a/w_a - W_b/w_b| ≤ longest_a/w_a + longest_b/w_b."""
    queue: FairQueue = FairQueue()
    left: Counter = Counter()
    for number, (tenant, cost) in enumerate(requests):
        queue.push((number, tenant, cost), "c", str(tenant), cost)
        left[tenant] += 1
    work: Counter = Counter()
    longest = max(cost for _, cost in requests)
    while min((left[tenant] for tenant in left), default=0) > 0:
        _, tenant, cost = queue.pop()
        left[tenant] -= 1
        work[tenant] += cost
        assert max(work[t] for t in left) - min(work[t] for t in left) <= 2 * longest + 1e-6


def test_tenants_that_have_gone_are_forgotten_once_their_debt_is_past() -> None:
    queue: FairQueue = FairQueue()
    queue.push(("patient", -1), "c", "patient", 1.0)
    for number in range(20_000):
        queue.push(("patient", number), "c", "patient", 1.0)
        queue.push(number, "c", f"served-{number}", 1.0)
        queue.push(-number - 1, "c", f"left-{number}", 1.0)
        queue.remove(-number - 1)
        queue.pop()
        queue.pop()
    assert len(queue._classes["c"].tenants) < 1_000
    assert len(queue._long) < 1_000
