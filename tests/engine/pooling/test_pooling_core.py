"""Whose inputs a step computes, and how requests end, over a runner that answers with the first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.errors import EngineDead, QueueFull
from leadline.engine.hub.local import LocalModel
from leadline.engine.messages import CoreOutput, PoolingRequest
from leadline.engine.models.encoder_config import read_encoder
from leadline.engine.pooling.core import PoolingCore
from leadline.engine.pooling.spec import PoolingSpec

ENCODER = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1000,
}
NOT_FINITE = 99
SPEC = PoolingSpec("embed", read_encoder(ENCODER), "mean", False, 1000)


class FirstToken:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        """First token of each input of each step."""
        self.error: Exception | None = None

    def run(self, inputs: Sequence[Sequence[int]], boundaries: Sequence[int | None]) -> np.ndarray:
        if self.error is not None:
            raise self.error
        self.steps.append([ids[0] for ids in inputs])
        return np.array([[ids[0] if ids[0] != NOT_FINITE else np.nan] for ids in inputs], np.float32)


def core_of(**settings: Any) -> tuple[PoolingCore, FirstToken]:
    runner = FirstToken()
    config = EngineConfig(model="m", prefill_step_ms=0.0, **settings).validate()
    core = PoolingCore(config, LocalModel(Path("."), "m", "r"), SPEC, runner=runner)  # type: ignore[arg-type]
    return core, runner


def request(name: str, inputs: list[list[int]], **fields: Any) -> PoolingRequest:
    return PoolingRequest(request_id=name, inputs=inputs, **{"arrival": time.monotonic(), **fields})


def finished(core: PoolingCore) -> dict[str, CoreOutput]:
    outputs = {}
    while core.has_work():
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


def test_a_small_request_overtakes_what_is_left_of_a_large_one() -> None:
    core, runner = core_of(max_num_batched_tokens=40, max_concurrent_requests=4)
    core.add_request(request("large", [[1] * 10] * 100))
    core.step()
    core.add_request(request("small", [[2] * 10]))
    assert [output.request_id for output in core.step()] == ["small"]
    assert runner.steps == [[1, 1, 1, 1], [2, 1, 1, 1]]
    outputs = finished(core)
    assert np.frombuffer(outputs["large"].pooled, np.float32).tolist() == [1.0] * 100


def test_two_large_requests_share_steps_by_tokens_and_by_the_weights_of_their_classes() -> None:
    core, runner = core_of(
        max_num_batched_tokens=40,
        max_concurrent_requests=40,
        class_weights={"interactive": 4.0, "batch": 1.0},
    )
    core.add_request(request("long", [[1] * 8] * 30))
    core.add_request(request("short", [[2] * 2] * 120))
    core.add_request(request("batch", [[3] * 2] * 120, priority_class="batch"))
    for _ in range(9):
        core.step()
    tokens = {
        first: sum(step.count(first) for step in runner.steps) * size
        for first, size in ((1, 8), (2, 2), (3, 2))
    }
    assert abs(tokens[1] - tokens[2]) <= 16
    assert 3 < tokens[1] / tokens[3] < 5.5


def test_a_step_is_bounded_by_tokens_and_inputs_but_takes_one_input_of_any_size() -> None:
    core, runner = core_of(max_num_batched_tokens=16, max_concurrent_requests=3)
    core.add_request(request("a", [[1] * 30, [2] * 10, [3] * 10, *[[4]] * 5]))
    finished(core)
    assert runner.steps == [[1], [2], [3, 4, 4], [4, 4, 4]]


def test_requests_end_by_abort_deadline_and_queue_timeout() -> None:
    core, runner = core_of(max_num_batched_tokens=4, max_concurrent_requests=4)
    now = time.monotonic()
    core.add_request(request("aborted", [[1] * 4] * 9))
    core.step()
    core.add_request(request("late", [[2] * 4], deadline=now - 1))
    core.add_request(request("first", [[3] * 4], queue_timeout=0.0))
    core.add_request(request("impatient", [[4] * 4], queue_timeout=0.0))
    core.add_request(request("patient", [[5] * 4], queue_timeout=1000.0))
    assert core.abort("aborted")
    assert not core.abort("aborted")
    outputs = finished(core)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "aborted": "abort",
        "late": "deadline",
        "first": "stop",
        "impatient": "queue_timeout",
        "patient": "stop",
    }
    assert runner.steps == [[1], [3], [5]]
    assert core.stats().timeouts_total == 2
    assert core.stats().waiting == core.stats().running == core.stats().queued_prefill_tokens == 0


def test_the_queue_is_bounded_by_the_inputs_ahead_so_that_large_requests_do_not_fill_it_for_small_ones() -> (
    None
):
    core, _ = core_of(max_queued_requests=3)
    core.add_request(request("a", [[1]] * 9))
    with pytest.raises(QueueFull, match="max_queued_requests"):
        core.add_request(request("large", [[1]] * 3))
    core.add_request(request("b", [[1]] * 2, priority_class="batch"))
    core.add_request(request("c", [[1]]))
    with pytest.raises(QueueFull, match="max_queued_requests"):
        core.add_request(request("d", [[1]]))
    assert core.stats().waiting_by_class == {"interactive": 2, "batch": 1}
    assert core.stats().queued_prefill_tokens == 12
    assert set(finished(core)) == {"a", "b", "c"}


def test_values_that_are_no_numbers_end_their_request_and_no_other() -> None:
    core, _ = core_of(max_num_batched_tokens=4, max_concurrent_requests=4)
    core.add_request(request("hurt", [[1], [NOT_FINITE], [1], [1], [1]]))
    core.add_request(request("spared", [[2]]))
    outputs = {output.request_id: output for output in core.step()}
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "hurt": "error",
        "spared": "stop",
    }
    assert "not finite" in (outputs["hurt"].error or "")
    assert not core.has_work()


def test_a_step_that_fails_ends_its_requests_and_three_end_the_engine() -> None:
    core, runner = core_of(max_num_batched_tokens=4, max_concurrent_requests=4)
    core.add_request(request("hurt", [[1] * 4] * 2))
    core.add_request(request("spared", [[2] * 4]))
    runner.error = RuntimeError("no such kernel")
    (output,) = core.step()
    assert output.request_id == "hurt"
    assert output.finish_reason == "error"
    assert "no such kernel" in (output.error or "")
    runner.error = None
    assert set(finished(core)) == {"spared"}
    runner.error = RuntimeError("no such kernel")
    for name in "ab":
        core.add_request(request(name, [[1]]))
        core.step()
    core.add_request(request("c", [[1]]))
    with pytest.raises(EngineDead, match="3 steps"):
        core.step()
