"""One run of a workload on one engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leadline.cli.matrix.workloads import Work

if TYPE_CHECKING:
    from leadline.engine import LLM

__all__ = ["Life", "Run", "percentile", "run_work"]


@dataclass(slots=True)
class Life:
    """One request: seconds on one clock."""

    began: float
    submitted: float = 0.0
    """Tokenized and given to the core."""
    admitted: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0

    @property
    def tpot(self) -> float:
        return (self.ended - self.first) / max(1, self.tokens - 1)


@dataclass(slots=True)
class Run:
    seconds: float
    lives: list[Life]
    output_tokens: int
    steps: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """(time, seconds by phase since the start) after each step, where a clock was given."""

    def numbers(self) -> dict[str, float]:
        """TTFT and TPOT in seconds, throughput in output tokens per second."""
        return {
            "ttft": percentile([life.first - life.began for life in self.lives], 0.5),
            "tpot": percentile([life.tpot for life in self.lives], 0.5),
            "throughput": self.output_tokens / self.seconds,
        }


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_work(llm: LLM, work: Work, clock: dict[str, float] | None = None) -> Run:
    """Generate everything, greedily and to the full length. `clock`: seconds by phase, growing as the engine
    runs; the detokenizer's time is added to it here.

    Prompts go in as text, made from the ids, so that tokenizing is part of it; they may come back a token
    longer or shorter.
    """
    from leadline.engine.sampling_params import SamplingParams

    core, builder, processor = llm.core, llm._builder, llm._processor
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=work.output_tokens)
    waiting = [llm.tokenizer.decode(prompt) for prompt in work.prompts]
    lives: dict[str, Life] = {}
    run = Run(0.0, [], 0)
    origin = time.monotonic()
    while waiting or core.has_work():
        while waiting and (work.together or not core.has_work()):
            text = waiting.pop(0)
            began = time.monotonic()
            llm._next_id += 1
            request = builder.build(text, params, add_special_tokens=False, request_id=f"m{llm._next_id}")
            life = lives[request.request_id] = Life(origin if work.together else began)
            for child in processor.add(request):
                core.add_request(child)
            life.submitted = life.admitted = time.monotonic()
            if clock is not None:
                clock["tokenize"] = clock.get("tokenize", 0.0) + life.submitted - began
        outputs = core.step()
        now = time.monotonic()
        for output in outputs:
            life = lives[output.request_id]
            if output.error is not None:
                raise RuntimeError(output.error)
            for delta in processor.process(output)[0]:
                if delta.queue_seconds is not None:
                    life.admitted = max(life.submitted, life.submitted + delta.queue_seconds)
                life.first = life.first or now
                life.tokens += len(delta.token_ids)
                life.ended = time.monotonic()
        if clock is not None:
            clock["detokenize"] = clock.get("detokenize", 0.0) + time.monotonic() - now
            run.steps.append((time.monotonic(), dict(clock)))
    run.seconds = time.monotonic() - origin
    run.lives = list(lives.values())
    run.output_tokens = sum(life.tokens for life in run.lives)
    return run
