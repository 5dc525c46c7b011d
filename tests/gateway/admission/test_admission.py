"""Admission to a service: which request enters when, how others are refused, and that all counts are
right."""

import asyncio
import random
import time
from collections import Counter

import pytest
from admission_helpers import admission, client, report, service, until

from leadline.gateway.access.principal import Principal
from leadline.gateway.admission.admission import Admission
from leadline.gateway.errors import DeadlinePassed, NoPods, QueueFull, QueueTimeout
from leadline.gateway.services import Service


class Request:
    """A client's request: enters, opens a lease on the first candidate, holds it until `finish`."""

    def __init__(
        self, gate: Admission, target: Service, who: Principal | None = None, *, deadline: float | None = None
    ) -> None:
        self.admission, self.target, self.who, self.deadline = gate, target, who or client(), deadline
        self.admitted = False
        self.waited = 0.0
        self.finish = asyncio.Event()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        async with self.admission.enter(self.target, self.who, self.deadline, 1) as admittance:
            now = time.monotonic()
            pod = self.admission.candidates(self.target, now)[0]
            with pod.lease(prefill_tokens=10, blocks=1, now=now):
                admittance.routed()
                self.waited = admittance.waited_seconds
                self.admitted = True
                await self.finish.wait()


async def test_requests_are_admitted_at_once_while_a_pod_has_capacity() -> None:
    gate, target = admission(), service(pods=2, concurrency=2)
    requests = [Request(gate, target) for _ in range(4)]
    await until(lambda: all(request.admitted for request in requests))
    assert [pod.in_flight for pod in target.pods.values()] == [2, 2]
    assert gate.saturated(target, time.monotonic())
    for request in requests:
        request.finish.set()
        await request.task
    assert gate.stats(target).queued == 0


async def test_the_next_request_is_admitted_when_one_ends() -> None:
    gate, target = admission(), service()
    first, second = Request(gate, target), Request(gate, target)
    await until(lambda: gate.waiting(target) == 1)
    assert first.admitted
    assert not second.admitted
    first.finish.set()
    await until(lambda: second.admitted)
    assert second.waited > 0
    second.finish.set()
    await asyncio.gather(first.task, second.task)
    assert gate.waiting(target) == gate.pending(target) == 0


async def test_requests_admitted_but_not_routed_yet_take_capacity() -> None:
    gate, target = admission(), service()
    async with gate.enter(target, client()):
        assert gate.pending(target) == 1
        second = Request(gate, target)
        await until(lambda: gate.waiting(target) == 1)
        assert not second.admitted
    await until(lambda: second.admitted)
    second.finish.set()
    await second.task


async def test_an_error_inside_gives_the_room_back() -> None:
    gate, target = admission(), service()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with gate.enter(target, client()):
                raise RuntimeError
        assert gate.pending(target) == 0


async def test_interactive_requests_go_before_batch_by_weight_and_batch_is_not_starved() -> None:
    gate, target = admission(class_weights={"interactive": 4.0, "batch": 1.0}), service()
    first = Request(gate, target)
    await until(lambda: first.admitted)
    order: list[str] = []

    async def one(kind: str) -> None:
        async with gate.enter(target, client(kind, kind)) as admittance:
            with target.pods["p0"].lease(prefill_tokens=1, blocks=1, now=time.monotonic()):
                admittance.routed()
                order.append(kind)

    tasks = [asyncio.create_task(one(kind)) for kind in ["batch"] * 20 + ["interactive"] * 20]
    await until(lambda: gate.waiting(target) == 40)
    first.finish.set()
    await asyncio.gather(first.task, *tasks)
    assert Counter(order[:20]) == {"interactive": 16, "batch": 4}


async def test_a_full_queue_is_refused_with_429_and_retry_after() -> None:
    gate, target = admission(max_queued=2), service()
    requests = [Request(gate, target) for _ in range(3)]
    await until(lambda: gate.waiting(target) == 2)
    with pytest.raises(QueueFull) as refused:
        await gate.enter(target, client()).__aenter__()
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert 1 <= refused.value.retry_after <= 60
    for request in requests:
        request.finish.set()
        await request.task


async def test_a_flood_of_one_tenant_does_not_shut_out_another() -> None:
    gate, target = admission(max_queued=10), service()
    flood = [Request(gate, target, client("flood")) for _ in range(11)]
    await until(lambda: gate.waiting(target) == 10)
    other = Request(gate, target, client("other"))
    await until(lambda: flood[-1].task.done())
    assert isinstance(flood[-1].task.exception(), QueueFull)
    flood[0].finish.set()
    flood[1].finish.set()
    await until(lambda: other.admitted)
    other.finish.set()
    for request in flood[:-1]:
        request.finish.set()
    await asyncio.gather(other.task, *(request.task for request in flood[:-1]))


async def test_retry_after_follows_the_rate_at_which_the_queue_moves() -> None:
    gate, target = admission(max_queued=0), service()
    state = gate._state_of(target)
    now = time.monotonic()
    for step in range(20):
        state.rate.one(now - 10 + step / 2)  # two a second
    assert 2 <= state.rate.retry_after(5, now) <= 3
    assert state.rate.retry_after(10_000, now) == 60
    assert state.rate.retry_after(5, now + 20) > 3, "a queue that stands still gets slower"


async def test_a_request_waits_no_longer_than_the_queue_timeout() -> None:
    gate, target = admission(queue_timeout_seconds=0.05), service()
    first = Request(gate, target)
    await until(lambda: first.admitted)
    with pytest.raises(QueueTimeout) as refused:
        await gate.enter(target, client()).__aenter__()
    assert (refused.value.status, refused.value.code) == (503, "queue_timeout")
    assert refused.value.retry_after >= 1
    assert gate.waiting(target) == 0
    first.finish.set()
    await first.task


async def test_a_deadline_ends_the_wait_with_504() -> None:
    gate, target = admission(), service()
    first = Request(gate, target)
    await until(lambda: first.admitted)
    with pytest.raises(DeadlinePassed) as refused:
        await gate.enter(target, client(), time.monotonic() + 0.05).__aenter__()
    assert (refused.value.status, refused.value.code) == (504, "deadline_exceeded")
    with pytest.raises(DeadlinePassed):
        await gate.enter(target, client(), time.monotonic() - 1).__aenter__()
    first.finish.set()
    await first.task


async def test_a_service_without_pods_is_waited_for() -> None:
    gate, target = admission(), service(pods=0)
    request = Request(gate, target)
    await until(lambda: gate.waiting(target) == 1)
    target.pods.update(service().pods)
    gate.changed(target)
    await until(lambda: request.admitted)
    request.finish.set()
    await request.task


async def test_a_service_that_gets_no_pods_is_refused_with_503() -> None:
    gate, target = admission(hold_without_pods_seconds=0.05), service(pods=0)
    with pytest.raises(NoPods) as refused:
        await gate.enter(target, client()).__aenter__()
    assert (refused.value.status, refused.value.code) == (503, "no_pods")
    assert refused.value.retry_after >= 5
    gate = admission(hold_without_pods_seconds=0)
    with pytest.raises(NoPods):
        await gate.enter(target, client()).__aenter__()


async def test_a_request_for_a_service_that_sleeps_waits_as_long_as_the_service_says() -> None:
    door, target = admission(hold_without_pods_seconds=0, queue_timeout_seconds=0.01), service(pods=0)
    target.wake_seconds = 60.0
    request = Request(door, target)
    await asyncio.sleep(0.05)  # beyond what the configuration says
    assert door.waiting(target) == 1
    target.pods["p0"] = service().pods["p0"]
    door.changed(target)
    await until(lambda: request.admitted)
    request.finish.set()
    await request.task
    target.pods.clear()
    target.wake_seconds = 0.05
    with pytest.raises(NoPods):
        await door.enter(target, client()).__aenter__()


async def test_a_service_whose_pod_cannot_come_refuses_those_who_wait_for_it() -> None:
    door, target = admission(), service(pods=0)
    target.wake_seconds = 60.0
    waiting = [Request(door, target) for _ in range(3)]
    await until(lambda: door.waiting(target) == 3)
    target.reason, target.stuck = "ImagePullFailed", True
    for request in waiting:
        with pytest.raises(NoPods, match="the operator reports ImagePullFailed"):
            await request.task
    with pytest.raises(NoPods):
        await door.enter(target, client()).__aenter__()
    assert door.waiting(target) == door.pending(target) == 0


async def test_draining_and_unready_pods_have_no_room() -> None:
    gate, target = admission(hold_without_pods_seconds=0), service(pods=3, concurrency=0)
    target.pods["p0"].terminating = True
    target.pods["p1"].ready = False
    target.pods["p2"].heartbeat(report("p2", draining=True), time.monotonic())
    with pytest.raises(NoPods):
        await gate.enter(target, client()).__aenter__()


async def test_a_client_that_leaves_is_taken_out_of_the_queue() -> None:
    gate, target = admission(), service()
    first, second, third = (Request(gate, target) for _ in range(3))
    await until(lambda: gate.waiting(target) == 2)
    second.task.cancel()
    await until(lambda: second.task.done())
    assert gate.waiting(target) == 1
    assert gate.stats(target).cancelled == 1
    first.finish.set()
    await until(lambda: third.admitted)
    third.finish.set()
    await asyncio.gather(first.task, third.task)


async def test_a_client_that_leaves_at_the_moment_of_its_admission_frees_its_capacity() -> None:
    gate, target = admission(), service()
    first, second, third = (Request(gate, target) for _ in range(3))
    await until(lambda: gate.waiting(target) == 2)
    target.pod_concurrency = 2
    gate._check_queue(gate._state_of(target))  # second's turn has come, its task has not run yet
    assert gate.pending(target) == 1
    second.task.cancel()
    await until(lambda: third.admitted)
    assert not second.admitted
    first.finish.set()
    third.finish.set()
    await asyncio.gather(first.task, third.task)
    assert gate.pending(target) == 0


async def test_capacity_that_comes_by_time_alone_is_noticed() -> None:
    """A circuit that opens again notifies no one."""

    class Later:
        opens = time.monotonic() + 0.2

        def allows(self, now: float) -> bool:
            return now >= self.opens

    gate, target = admission(), service()
    target.pods["p0"].circuit = Later()
    request = Request(gate, target)
    await until(lambda: request.admitted)
    request.finish.set()
    await request.task


async def test_a_service_that_is_removed_refuses_whoever_waits() -> None:
    gate, target = admission(), service(pods=0)
    request = Request(gate, target)
    await until(lambda: gate.waiting(target) == 1)
    gate.forget(target)
    with pytest.raises(NoPods):
        await request.task


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_or_counted_twice_whatever_happens(seed: int) -> None:
    """Requests that come, finish, fail, are cancelled and time out in any order, on pods that come and go."""
    rng = random.Random(seed)
    gate = admission(max_queued=30, queue_timeout_seconds=5.0)
    target = service(pods=3, concurrency=2)
    spare = target.pods["p2"]
    alive: list[Request] = []
    everyone: list[Request] = []
    for _ in range(600):
        action = rng.random()
        if action < 0.4:
            who = client(rng.choice("abc"), rng.choice(["interactive", "batch"]))
            deadline = time.monotonic() + rng.uniform(0, 0.05) if rng.random() < 0.2 else None
            alive.append(Request(gate, target, who, deadline=deadline))
            everyone.append(alive[-1])
        elif action < 0.7 and alive:
            alive.pop(rng.randrange(len(alive))).finish.set()
        elif action < 0.85 and alive:
            alive.pop(rng.randrange(len(alive))).task.cancel()
        elif action < 0.88:
            spare.ready = not spare.ready
            gate.changed(target)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        assert gate.pending(target) >= 0
        for pod in target.pods.values():
            assert 0 <= pod.in_flight <= 2
        assert all(pod.in_flight <= 2 for pod in target.pods.values())
    spare.ready = True
    gate.changed(target)
    for request in alive:
        request.finish.set()
    outcomes = await asyncio.gather(*(request.task for request in everyone), return_exceptions=True)
    known = (asyncio.CancelledError, QueueFull, DeadlinePassed)
    assert all(outcome is None or isinstance(outcome, known) for outcome in outcomes), outcomes
    assert gate.waiting(target) == gate.pending(target) == 0
    assert all(pod.in_flight == 0 for pod in target.pods.values())
    stats = gate.stats(target)
    # Tasks that were cancelled before their first step never asked for admission.
    assert stats.admitted + sum(stats.refused.values()) <= len(everyone)
    assert stats.admitted >= sum(request.admitted for request in everyone)
