"""Phases of a step: in order, whole, and nearly free without a sink."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.messages import CoreRequest
from leadline.engine.profiling import PHASES, PhaseClock, Phases, nvtx_sink
from leadline.engine.profiling.trace_requests import TraceRequests
from leadline.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def core() -> EngineCore:
    config = EngineConfig(
        model="smollm2", device="cpu", max_model_len=256, cpu_kv_bytes=1 << 26, max_concurrent_requests=4
    )
    return EngineCore(config, resolve_model("smollm2", progress=False), progress=False)


def run(core: EngineCore, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    core.add_request(
        CoreRequest(request_id="r", prompt_token_ids=[5, 6, 7], sampling=params, seed=0, arrival=0.0)
    )
    while core.has_work():
        core.step()


def test_each_step_enters_each_phase_once_and_in_order(core: EngineCore) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def note(name: str):
        seen.append(name)
        yield

    core.phases.sink = note
    run(core, 3)
    core.phases.sink = None
    assert seen == list(PHASES) * 3


def test_a_clock_adds_up_to_no_more_than_the_time_that_passed(core: EngineCore) -> None:
    clock = PhaseClock()
    core.phases.sink = clock
    began = time.perf_counter()
    run(core, 4)
    passed = time.perf_counter() - began
    core.phases.sink = None
    assert clock.counts == dict.fromkeys(PHASES, 4)
    assert 0.5 * passed < sum(clock.seconds.values()) < passed
    assert max(clock.seconds, key=lambda name: clock.seconds[name]) == "forward"


def test_a_phase_that_nobody_watches_costs_less_than_a_microsecond() -> None:
    phases = Phases()
    rounds = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(2000):
            with phases("schedule"):
                pass
        rounds.append((time.perf_counter() - began) / 2000)
    assert min(rounds) < 1e-6


def test_nvtx_without_cuda_marks_nothing() -> None:
    import torch

    assert (nvtx_sink() is None) == (not torch.cuda.is_available())


def test_a_directory_that_cannot_be_made_is_an_answer_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers: list[wire.Profiled] = []
    requests = TraceRequests(str(tmp_path / "file" / "below"), Phases(), answers.append)
    requests.ask(wire.Profile(7, steps=1))
    requests.look()
    assert [(answer.call_id, answer.code) for answer in answers] == [(7, "profile_failed")]
    assert "profile_dir" in answers[0].error


def test_a_trace_ends_after_its_seconds_though_no_step_was_made(tmp_path: Path) -> None:
    answers: list[wire.Profiled] = []
    phases = Phases()
    requests = TraceRequests(str(tmp_path), phases, answers.append)
    requests.ask(wire.Profile(1, seconds=0.01))
    assert phases.sink is not None
    requests.ask(wire.Profile(2, steps=1))
    assert [(answer.call_id, answer.code) for answer in answers] == [(2, "profile_running")]
    while len(answers) < 2:
        requests.look()
    assert (answers[1].call_id, answers[1].code, answers[1].steps) == (1, None, 0)
    assert Path(answers[1].path).parent == tmp_path
    assert phases.sink is None
