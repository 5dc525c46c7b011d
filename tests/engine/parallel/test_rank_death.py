"""Death of a rank, at every time, is a typed error soon; nothing outlives the leader (E24)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch
from parallel_rig import processes, tiny_model

from leadline.engine.errors import EngineDead, OutOfMemory, UnsupportedModel
from leadline.engine.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture
def tiny(tmp_path):
    return tiny_model(tmp_path, "llama", max_position_embeddings=512)


def died(core, seconds: float = 10.0) -> tuple[EngineDead, float]:
    """Run the loop until it raises; the error and how long that took."""
    began = time.monotonic()

    def loop() -> None:
        while time.monotonic() - began < seconds:
            if core.has_work():
                core.step()
            else:
                time.sleep(0.01)  # the loop's own wait for messages

    with pytest.raises(EngineDead) as caught:
        loop()
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "idle"])
def test_a_killed_rank_is_a_typed_error_within_two_seconds(rig, ranks, tiny, busy):
    core = ranks.core(3, tiny, block_size=16, cpu_kv_bytes=1 << 22)
    if busy:
        core.add_request(rig.request("a", [5, 6, 7], LONG, eos_token_ids=()))
        for _ in range(5):
            core.step()
    workers = processes(core)
    workers[1].kill()
    error, seconds = died(core)
    assert seconds < 2
    assert "rank 2 was killed by SIGKILL" in str(error)
    with pytest.raises(EngineDead, match="rank 2 was killed"):
        core.has_work()
    core.runner.close()
    assert not any(worker.is_running() for worker in workers)


def test_a_rank_that_is_stopped_does_not_keep_the_leader_from_closing(ranks, tiny):
    core = ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    (worker,) = processes(core)
    worker.suspend()
    core.runner.close()
    assert not worker.is_running()


LEADER = """
    import sys
    from pathlib import Path
    from leadline.engine.config import EngineConfig
    from leadline.engine.core_process.engine_core import EngineCore
    from leadline.engine.hub.local import LocalModel
    from leadline.engine.messages import CoreRequest
    from leadline.engine.sampling_params import SamplingParams

    config = EngineConfig(model="any", device="cpu", tensor_parallel=2, max_model_len=512)
    core = EngineCore(config, LocalModel(Path(sys.argv[1]), "tiny", "1"), progress=False)
    print("ready", flush=True)
    endless = SamplingParams(temperature=0, max_tokens=500)
    while True:
        if not core.has_work():
            request = CoreRequest(
                request_id="a", prompt_token_ids=[5, 6, 7], sampling=endless, seed=0, arrival=0.0
            )
            core.add_request(request)
        core.step()
"""


def test_ranks_of_a_killed_leader_leave_and_leave_nothing_behind(tiny, tmp_path_factory):
    """E24. Killed in the middle of steps."""
    scratch = tmp_path_factory.mktemp("scratch")
    shared_before = set(os.listdir("/dev/shm"))
    leader = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LEADER), str(tiny.path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    with leader:
        assert leader.stdout.readline() == b"ready\n"
        workers = psutil.Process(leader.pid).children()
        assert len(workers) == 1
        os.kill(leader.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=3)
    assert not alive
    assert not list(scratch.iterdir())
    assert set(os.listdir("/dev/shm")) <= shared_before


def test_two_engines_of_several_ranks_work_side_by_side(rig, ranks, tiny):
    """E24: no port, no name, no global state that both would need."""
    first, second = (ranks.core(2, tiny, cpu_kv_bytes=1 << 22) for _ in range(2))
    greedy = SamplingParams(temperature=0, max_tokens=20)
    for core in (first, second):
        for name in "ab":
            core.add_request(rig.request(name, [5, 6, ord(name)], greedy, eos_token_ids=()))
    tokens = ({"a": [], "b": []}, {"a": [], "b": []})
    while first.has_work() or second.has_work():
        for core, seen in zip((first, second), tokens, strict=True):
            for output in core.step():
                seen[output.request_id] += output.new_token_ids
    assert tokens[0] == tokens[1]
    assert len(tokens[0]["a"]) == 20
    first.runner.close()
    assert rig.run(second, [[5, 6, ord("a")]], greedy, eos_token_ids=()) == [tokens[0]["a"]]


def test_an_engine_that_is_dropped_takes_its_ranks_along(rig, ranks, tiny):
    core = ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    rig.run(core, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
    workers = processes(core)
    ranks._cores.clear()
    del core
    assert not psutil.wait_procs(workers, timeout=5)[1]


def test_what_fails_while_a_rank_is_built_has_its_own_type(ranks, tiny):
    with pytest.raises(OutOfMemory, match="one sequence of max_model_len 512"):
        ranks.core(2, tiny, cpu_kv_bytes=4096)
    for file in tiny.path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"cannot be read|do not fit") as caught:
        ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    assert type(caught.value).__name__ in ("ModelNotFound", UnsupportedModel.__name__)


@pytest.fixture
def only_workers_run(monkeypatch, tmp_path):
    """Code that runs in workers after their imports, through a sitecustomize of their own."""

    def install(code: str) -> None:
        head = "import sys\nif any('parallel.worker' in word for word in sys.orig_argv):\n"
        (tmp_path / "sitecustomize.py").write_text(head + textwrap.indent(textwrap.dedent(code), "    "))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return install


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (
            "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1 GiB')",
            OutOfMemory,
            "rank 1: out of device memory while allocating the KV cache.*CUDA out of memory",
        ),
        ("import os; os.kill(os.getpid(), 9)", EngineDead, "rank 1 was killed by SIGKILL"),
    ],
    ids=["out of memory", "killed"],
)
def test_a_rank_that_fails_alone_while_loading_is_named(
    ranks, tiny, only_workers_run, action, error, message
):
    only_workers_run(f"""
        import torch
        import leadline.engine.runner.assemble as assemble

        def allocate_kv(*args):
            {action}

        assemble.allocate_kv = allocate_kv
    """)
    with pytest.raises(error, match=message):
        ranks.core(2, tiny, cpu_kv_bytes=1 << 22)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "rank 1: out of device memory in a step"),
        ("raise RuntimeError('a kernel broke')", r"rank 1: a kernel broke \(RuntimeError\)"),
    ],
    ids=["out of memory", "broken"],
)
def test_a_rank_that_fails_alone_in_a_step_is_named(rig, ranks, tiny, only_workers_run, action, message):
    only_workers_run(f"""
        import torch
        from leadline.engine.runner.model_runner import ModelRunner

        launch = ModelRunner.launch

        def failing(self, plan):
            if plan.rows[0].start > 5:
                {action}
            return launch(self, plan)

        ModelRunner.launch = failing
    """)
    core = ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    core.add_request(rig.request("a", [5, 6, 7], LONG, eos_token_ids=()))
    error, seconds = died(core)
    assert re.search(message, str(error)), error
    assert seconds < 5


def test_a_leader_that_fails_alone_is_out_of_step_for_good(rig, ranks, tiny, monkeypatch):
    core = ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    core.add_request(rig.request("a", [5, 6, 7], LONG, eos_token_ids=()))
    core.step()

    def launch(plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(core.runner.runner, "launch", launch)
    with pytest.raises(EngineDead, match=r"out of device memory in a step.*max_num_batched_tokens"):
        core.step()
    monkeypatch.undo()
    with pytest.raises(EngineDead, match="out of device memory in a step"):
        core.step()


@pytest.mark.parametrize("when", ["before a step", "in a step"])
def test_a_rank_that_hangs_is_named_and_ends_the_engine(
    rig, ranks, tiny, monkeypatch, only_workers_run, when
):
    monkeypatch.setenv("LEADLINE_TP_TIMEOUT", "2")
    if when == "in a step":
        only_workers_run("""
            import time
            from leadline.engine.runner.model_runner import ModelRunner

            launch = ModelRunner.launch

            def hanging(self, plan):
                if plan.rows[0].start > 5:
                    time.sleep(1000)
                return launch(self, plan)

            ModelRunner.launch = hanging
        """)
    core = ranks.core(2, tiny, cpu_kv_bytes=1 << 22)
    (worker,) = processes(core)
    core.add_request(rig.request("a", [5, 6, 7], LONG, eos_token_ids=()))
    core.step()
    if when == "before a step":
        worker.suspend()
    error, seconds = died(core)
    assert re.search(r"a step has not ended within 2 s: rank 1 (is stopped|or rank 0 hangs)", str(error)), (
        error
    )
    assert ("is stopped" in str(error)) == (when == "before a step")
    assert seconds < 5
    assert not psutil.wait_procs([worker], timeout=5)[1]
