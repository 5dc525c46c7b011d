"""`leadline bench matrix` on a tiny model with random weights: runs for real, in seconds."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from leadline.cli.main import main
from leadline.cli.matrix.budget import Budget
from leadline.cli.matrix.command import matrix
from leadline.cli.matrix.makeup import _KERNELS, PARTS, _split_by_gpu, part_of_kernel
from leadline.cli.matrix.measure import Run
from leadline.cli.matrix.table import markdown, plot, rows
from leadline.cli.matrix.techniques import TECHNIQUES, Machine, Technique
from leadline.cli.matrix.workloads import Size, make

ROOT = Path(__file__).parents[2]
CPU = Machine(gpus=0, cores=2, fp8=False)
RAN = ["dynamic batching", "prefix cache", "overlap scheduling", "n-gram speculation"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("gpu_models", ROOT / "benchmarks" / "gpu_models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    return models.write_model(folder, models.SHAPES["tiny"], "float32")


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("out")
    names = ",".join([*RAN, "CUDA graphs", "FP8 weights"])
    code = main(
        [
            *("bench", "matrix", str(tiny), "--load-format", "dummy", "--device", "cpu"),
            *("--cpu-kv-bytes", str(1 << 24), "--max-model-len", "512", "--cpu-threads", "1"),
            *("--requests", "4", "--prompt-tokens", "96", "--output-tokens", "12", "--rounds", "5"),
            *("--techniques", names, "--json", str(folder / "r.json"), "--plot", str(folder / "r.png")),
        ]
    )
    assert code == 0
    return json.loads((folder / "r.json").read_text()), folder / "r.png"


def test_every_technique_is_measured_on_and_off_or_said_not_to_run(measured) -> None:
    result, _ = measured
    assert set(result["techniques"]) == {*RAN, "CUDA graphs", "FP8 weights"}
    for name in RAN:
        entry = result["techniques"][name]
        for side in ("off", "on"):
            assert set(entry[side]) == {"ttft", "tpot", "throughput"}
            assert min(entry[side].values()) > 0
        assert entry["rounds"] == 5
        assert entry["requests"] == (1 if entry["workload"] == "copying" else 4)
    assert "GPU" in result["techniques"]["CUDA graphs"]["not_run"]
    assert "GPU" in result["techniques"]["FP8 weights"]["not_run"]


def test_batching_brings_throughput(measured) -> None:
    entry = measured[0]["techniques"]["dynamic batching"]
    assert entry["on"]["throughput"] > entry["off"]["throughput"]


def test_the_parts_of_a_latency_are_named_and_add_up_to_it(measured) -> None:
    result, _ = measured
    makeup = result["makeup"]
    assert list(makeup) == list(PARTS)
    assert min(makeup.values()) >= 0
    for part in ("tokenize", "schedule", "attention", "other GPU", "sample", "detokenize"):
        assert makeup[part] > 0, part
    # Four requests of 12 tokens at once: their mean latency is close to the whole run's time.
    entry = result["techniques"]["prefix cache"]["on"]
    assert sum(makeup.values()) < 20 * (entry["ttft"] + 11 * entry["tpot"])


def test_the_plot_is_a_picture(measured) -> None:
    assert measured[1].read_bytes().startswith(b"\x89PNG")


def test_one_technique_that_breaks_does_not_cost_the_others(tiny: Path, monkeypatch) -> None:
    settings = dict.fromkeys(("num_kv_blocks", "overlap", "max_model_len", "quantization", "served_name"))
    settings |= {"load_format": "dummy", "device": "cpu", "cpu_kv_bytes": 1 << 24, "cpu_threads": 1}
    settings |= {"max_concurrent_requests": 2, "prefix_caching": True, "speculative_ngram": 0}
    broken = Technique("broken", "shared prefix", on={}, off={"cpu_kv_bytes": 1})
    fine = Technique("prefix cache", "shared prefix", on={}, off={"prefix_caching": False})
    monkeypatch.setattr("leadline.cli.matrix.command.TECHNIQUES", (broken, fine))
    saved = []
    size = Size(requests=2, prompt_tokens=96, output_tokens=4)
    result = matrix(str(tiny), settings, size, 1, save=lambda found: saved.append(set(found["techniques"])))
    assert "OutOfMemory" in result["techniques"]["broken"]["failed"]
    assert result["techniques"]["prefix cache"]["on"]["ttft"] > 0
    assert len(saved) == 3
    assert "Failed: broken (OutOfMemory" in markdown(result)
    assert all("prefix cache" in workload for workload, *_ in rows(result)[:6])


def test_what_broke_off_is_still_shown(tmp_path: Path) -> None:
    result = {
        "model": "m",
        "machine": "x",
        "size": "2 requests",
        "rounds": 3,
        "makeup": {"failed": "Oops: no"},
    }
    result["techniques"] = {"FP8 weights": {"workload": "copying", "not_run": "the run ended before it"}}
    assert rows(result) == []
    assert "Not run: FP8 weights (the run ended before it)." in markdown(result)
    assert "Failed: make-up of the latency (Oops: no)." in markdown(result)
    plot(result, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


def test_time_is_shared_among_what_is_left_to_do() -> None:
    began = time.monotonic()
    budget = Budget(10.0, 4)
    assert budget.end_of_share() - began == pytest.approx(2.5, abs=0.1)
    # The first took nothing, so there is more for the others.
    assert budget.end_of_share() - began == pytest.approx(10 / 3, abs=0.1)
    assert Budget(None, 4).end_of_share() == math.inf
    assert Budget(0.0, 4).end_of_share() <= time.monotonic()


def test_idle_time_of_a_gpu_is_the_hosts_by_what_it_did() -> None:
    # 10 s, of which the GPU worked 6; the host waited 5 of them, and of its own 5 it scheduled for 2.
    run = Run(10.0, [], 0, [(10.0, {"wait": 5.0, "schedule": 2.0})])
    split = _split_by_gpu(run, {"attention": 2.0, "other GPU": 4.0})
    parts = split(5.0, {"wait": 2.5, "schedule": 1.0})
    assert parts["attention"] == pytest.approx(1.0)
    assert parts["other GPU"] == pytest.approx(2.0)
    assert parts["schedule"] == pytest.approx(2.0 * 1.0 / 2.5)
    assert parts["other host"] == pytest.approx(2.0 * 1.5 / 2.5)
    assert sum(parts.values()) == pytest.approx(5.0)


def test_each_of_our_kernels_belongs_to_the_part_that_its_folder_says() -> None:
    """A kernel with an unknown name would count as the model's."""
    engine = ROOT / "engine/leadline/engine"
    parts = {"attention": "attention", "sampling": "sample"}
    parts |= {"models": "other GPU", "collectives": "other GPU"}
    found = {}
    for file in engine.rglob("*.py"):
        for kernel in re.findall(r"^def (\w*_kernel)\(", file.read_text(), re.MULTILINE):
            moves = kernel in ("_fill_kernel", "_write_kernel")
            found[kernel] = part_of_kernel(kernel)
            assert found[kernel] == ("data movement" if moves else parts[file.parent.name]), kernel
    assert {"decode_kernel", "prefill_kernel", "scan_kernel", "skinny_kernel", "_fill_kernel"} <= set(found)
    for mark in (mark for _, marks in _KERNELS for mark in marks if mark.endswith("_kernel")):
        assert mark in found


def test_a_technique_that_does_not_exist_is_refused_by_name(tiny: Path, capsys) -> None:
    assert main(["bench", "matrix", str(tiny), "--techniques", "magic"]) == 1
    assert "magic" in capsys.readouterr().err


def test_what_a_machine_lacks_is_the_reason_given() -> None:
    why = {technique.name: technique.cannot_run(CPU) for technique in TECHNIQUES}
    assert why["CUDA graphs"] == "needs a GPU"
    assert why["tensor parallel 2"] is None
    by_name = {technique.name: technique for technique in TECHNIQUES}
    assert "two GPUs" in (by_name["tensor parallel 2"].cannot_run(Machine(1, 8, True)) or "")
    assert all(technique.cannot_run(Machine(2, 8, True)) is None for technique in TECHNIQUES)


def test_prompts_share_what_their_workload_says() -> None:
    size = Size(requests=8, prompt_tokens=60, output_tokens=4)
    shared = make("shared prefix", size, 10_000, 1)
    assert len({tuple(prompt[:30]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in shared.prompts}) == 8
    assert {len(prompt) for prompt in shared.prompts} == {60}
    assert make("shared prefix", size, 10_000, 2).prompts[0][:30] != shared.prompts[0][:30]
    for prompt in make("copying", size, 10_000, 1).prompts:
        assert prompt[:10] == prompt[10:20] == prompt[20:]


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "data movement"),
        ("_fill_kernel", "data movement"),
        ("scan_kernel", "sample"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps<float>>>", "sample"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "other GPU"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "other GPU"),
        ("gemv_kernel", "other GPU"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, part: str) -> None:
    assert part_of_kernel(kernel) == part
