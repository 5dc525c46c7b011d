"""Random operation sequences on scheduler and pool, against a runner that knows whose KV each block holds."""

from __future__ import annotations

import pytest
from core_sim import EOS, Loop, request
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from leadline.engine.core import LengthAwareEviction, LRUEviction
from leadline.engine.errors import QueueFull, RequestError
from leadline.engine.messages import ThoughtSpec

BASES = [[(7 * base + 3 * i) % 39 + 1 for i in range(60)] for base in range(3)]

THOUGHTS = [
    ThoughtSpec(
        begins=begins,
        ends=((30,), (33,), (21, 36)),
        opens=tuple((token,) for token in range(20, 30)),
        answers=((34,), (35,), (30, 31)) if begins == "between" else (),
        budget=budget,
        closing=(31, 30, 31) if begins == "between" else (31, 30),
    )
    for begins in ("inside", "maybe", "between")
    for budget in (None, 0, 1, 4)
]

prompts = st.builds(
    lambda base, shared, tail: BASES[base][:shared] + tail,
    st.integers(0, 2),
    st.sampled_from([0, 3, 4, 8, 11, 12, 16, 24, 40]),
    st.lists(st.integers(1, 39), max_size=9),
).filter(len)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, resets and moves the clock in any order; then drains and compares."""

    depth = 0

    @initialize(
        num_blocks=st.sampled_from([4, 6, 9, 14, 40, 200]),
        eviction=st.sampled_from([LRUEviction, LengthAwareEviction]),
        caching=st.sampled_from([True, True, True, False]),
        chunk=st.sampled_from([None, 1, 3, 8]),
        concurrent=st.sampled_from([1, 2, 5, 8]),
        budget=st.sampled_from([8, 13, 64]),
        max_model_len=st.sampled_from([30, 400]),
    )
    def start(self, num_blocks, eviction, caching, chunk, concurrent, budget, max_model_len) -> None:
        self.count = 0
        self.loop = self.make_loop(
            num_blocks,
            depth=self.depth,
            eviction=eviction(),
            prefix_caching=caching,
            prefill_chunk=chunk,
            max_concurrent_requests=concurrent,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_queued_requests=12,
        )

    def make_loop(self, num_blocks, **settings) -> Loop:
        return Loop(num_blocks, **settings)

    @rule(
        prompt=prompts,
        follow=st.one_of(st.none(), st.integers(0, 1000)),
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 5]),
        stops=st.sampled_from([(), (EOS,), (EOS, 5, 9, 13)]),
        batch=st.booleans(),
        salt=st.sampled_from([0, 0, 0, 1]),
        structured=st.sampled_from([False, False, True]),
        thought=st.sampled_from([None, None, *THOUGHTS]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        copies=st.sampled_from([1, 1, 1, 3]),
        deadline=st.sampled_from([None, None, None, 4.0]),
        queue_timeout=st.sampled_from([None, None, 2.0]),
        resumed=st.integers(0, 3),
    )
    def add(
        self,
        prompt,
        follow,
        max_tokens,
        min_tokens,
        stops,
        batch,
        salt,
        structured,
        thought,
        prompt_logprobs,
        copies,
        **times,
    ) -> None:
        deadline = None if times["deadline"] is None else self.loop.now + times["deadline"]
        if follow is not None and self.loop.final:  # the next turn of an earlier conversation
            earlier = sorted(self.loop.final)[follow % len(self.loop.final)]
            prompt = self.loop.requests[earlier].prompt_token_ids + self.loop.tokens[earlier] + prompt[:2]
        resumed = times["resumed"] if len(prompt) > 3 and max_tokens > 3 else 0
        for _ in range(copies):
            self.count += 1
            req = request(
                f"r{self.count}",
                prompt,
                salt=salt,
                structured=structured,
                thought=thought,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                eos_token_ids=stops[:1],
                stop_token_ids=stops[1:],
                prompt_logprobs=prompt_logprobs,
                priority_class="batch" if batch else "interactive",
                arrival=self.loop.now,
                deadline=deadline,
                queue_timeout=times["queue_timeout"],
                num_resumed=resumed,
            )
            if len(prompt) >= self.loop.limit:
                with pytest.raises(RequestError, match=str(len(prompt))):
                    self.loop.add(req)
                return
            try:
                self.loop.add(req)
            except QueueFull:
                assert self.loop.scheduler.stats().waiting >= 12

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.loop.step()

    @rule()
    def read_one(self) -> None:
        if self.loop.flights:
            self.loop.read()

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        names = sorted(set(self.loop.requests) - set(self.loop.final))
        if names:
            self.loop.abort(names[pick % len(names)])

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.now += seconds

    @rule()
    def reset(self) -> None:
        self.loop.scheduler.reset_prefix_cache()

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run()
        self.loop.check_exact()
        for name, output in self.loop.final.items():
            req = self.loop.requests[name]
            if req.sampling.prompt_logprobs is not None and self.loop.tokens[name]:
                first = next(out for out in self.loop.outputs[name] if out.new_token_ids)
                assert [entry.token_id for entry in first.prompt_logprobs] == req.prompt_token_ids[1:]
            if output.finish_reason in ("deadline", "queue_timeout"):
                assert req.deadline is not None or req.queue_timeout is not None


class OneInFlight(SchedulerMachine):
    depth = 1


class TwoInFlight(SchedulerMachine):
    depth = 2


_SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],  # add Phase.shrink when a failure has to be understood
)
TestNothingInFlight = SchedulerMachine.TestCase
TestOneInFlight = OneInFlight.TestCase
TestTwoInFlight = TwoInFlight.TestCase
TestNothingInFlight.settings = TestOneInFlight.settings = TestTwoInFlight.settings = _SETTINGS
