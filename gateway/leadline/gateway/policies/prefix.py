"""Policy `prefix`: the pod expected to give the first token soonest. The default.

    seconds = queued prefill tokens / rate                    what is in front of us
            + (prompt - matched) tokens / rate                what the pod lacks of the prompt
            + wait for free blocks                            if the pod's KV memory is full
            + decode_weight * decode delay                    what our decode costs the streams on the pod

`rate` is the pod's measured prefill tokens per second; a pod that has measured none yet is taken to be like
the mean of the others, or `default_prefill_rate` if none has measured it.

Wait for free blocks, by Little's law: a request holds its blocks for about `expected_output` steps, so a pod
that uses U blocks frees U / (expected_output * step) of them a second; a deficit of D blocks lasts D *
expected_output * step / U.

Decode delay: with b requests on a pod a step takes s0 * (1 + b / knee), where `knee` is the number of
requests at which reading the weights and serving the requests take equally long. One more adds s0 / knee to
each of our steps, for b + 1 streams: output * step * (b + 1) / (knee + b) seconds in all. `decode_weight`
says what a second of theirs is worth in seconds of our first token.

Herds (P20): requests on their way count as load at once (pods.py), and pods within `tie_relative` and
`tie_seconds` of the best share the requests at random, so that gateways that see the same report do not all
run to one pod.
"""

import random
from collections.abc import Sequence

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, PodScore, RouteRequest, matched_tokens, require

__all__ = ["PrefixPolicy"]


class PrefixPolicy:
    """Expected seconds to first token. Parameters are in the module's docstring and in README.md."""

    name = "prefix"

    def __init__(
        self,
        *,
        expected_output: int = 256,
        knee: float = 64.0,
        decode_weight: float = 0.1,
        tie_relative: float = 0.05,
        tie_seconds: float = 0.005,
        default_prefill_rate: float = 5_000.0,
        default_step_seconds: float = 0.02,
        seed: int | None = None,
    ) -> None:
        positive = {
            "expected_output": expected_output,
            "knee": knee,
            "default_prefill_rate": default_prefill_rate,
            "default_step_seconds": default_step_seconds,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        not_negative = {
            "decode_weight": decode_weight,
            "tie_relative": tie_relative,
            "tie_seconds": tie_seconds,
        }
        for name, value in not_negative.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, but is {value}")
        self.expected_output = expected_output
        self.knee = knee
        self.decode_weight = decode_weight
        self.tie_relative = tie_relative
        self.tie_seconds = tie_seconds
        self.default_prefill_rate = default_prefill_rate
        self.default_step_seconds = default_step_seconds
        self._random = random.Random(seed)

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        require(pods)
        parts = self._parts(request, pods)
        totals = [queue + prefill + wait + decode for queue, prefill, wait, decode in parts]
        best = min(totals)
        limit = best + max(self.tie_seconds, best * self.tie_relative)
        near = [position for position, total in enumerate(totals) if total <= limit]
        if len(near) == 1:
            chosen, reason = near[0], f"soonest of {len(pods)}"
        else:
            chosen = near[int(self._random.random() * len(near))]
            reason = f"{len(near)} of {len(pods)} about equal"

        def score(position: int) -> PodScore:
            pod = pods[position]
            return PodScore(
                pod.id,
                matched_tokens(request, pod),
                pod.requests(request.now),
                totals[position],
                *parts[position],
            )

        scores = tuple(score(position) for position in range(len(pods))) if request.explain else ()
        return Decision(pods[chosen], self.name, reason, score(chosen), scores)

    def _parts(self, request: RouteRequest, pods: Sequence[Pod]) -> list[tuple[float, float, float, float]]:
        """Seconds of queue, prefill, wait for blocks and decode on each pod: about 1 µs a pod."""
        now, prompt, block_size = request.now, request.prompt_tokens, request.block_size
        depths, computed_always = request.matched_blocks, min(1, prompt)
        output, knee = self.expected_output, self.knee
        if request.max_tokens is not None and request.max_tokens < output:
            output = request.max_tokens
        decode_tokens = self.decode_weight * output
        peers: tuple[float, float] | None = None
        parts = []
        for pod in pods:
            report, rate, step = pod.report, 0.0, 0.0
            if report is not None:
                rate, step = report.prefill_tokens_per_second, report.decode_step_seconds
            if not rate or not step:
                peers = peers or self._peer_rates(pods)
                rate, step = rate or peers[0], step or peers[1]
            running, queued, free = pod.load(now)
            missing = prompt - depths.get(pod.id, 0) * block_size
            if missing < computed_always:
                missing = computed_always
            wait = 0.0
            if free is not None and report is not None and missing > free * block_size:
                # The engine admits a request when its prompt fits; matched blocks are in memory already.
                deficit = -(-missing // block_size) - free
                used = max(1, report.total_blocks - max(0, free))
                wait = deficit * self.expected_output * step / used
            decode = decode_tokens * step * (running + 1) / (knee + running)
            parts.append((queued / rate, missing / rate, wait, decode))
        return parts

    def _peer_rates(self, pods: Sequence[Pod]) -> tuple[float, float]:
        """Prefill rate and step time for pods that have measured none: the mean of those that have."""
        rates, steps = [], []
        for pod in pods:
            report = pod.report
            if report is not None:
                if report.prefill_tokens_per_second:
                    rates.append(report.prefill_tokens_per_second)
                if report.decode_step_seconds:
                    steps.append(report.decode_step_seconds)
        return (
            sum(rates) / len(rates) if rates else self.default_prefill_rate,
            sum(steps) / len(steps) if steps else self.default_step_seconds,
        )
