"""Sums over ranks by size, in a CUDA graph: NCCL, PyTorch's symmetric memory, and our fabric; checked first.

    PYTHONPATH=protocol:engine python3 benchmarks/gpu_allreduce.py --tp 2 --json results.jsonl

Each number is the time of one sum among twenty in a graph, microseconds, median of 30 replays on rank 0. Rows
are 4,096 wide in bfloat16.

    nccl              ncclAllReduce
    torch one, two    torch.ops.symm_mem.one_shot_all_reduce_out, two_shot_all_reduce_
    sum               our one-shot sum                    nccl+norm    NCCL, then residual add and RMSNorm
    one+norm, two+norm    ours, fused with residual add and RMSNorm, one and two shots

`--check` only compares with float64: sums, fused sums, gathers, eager and in graphs, many times over.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpu_results import result_line
from leadline.engine.models.parallel import Sum
from leadline.engine.runner.collectives.fabric import Fabric, FabricSpec, make_collectives
from leadline.engine.runner.collectives.group import RankGroup, c10d, device_of
from leadline.engine.runner.parallel.ring import unnamed_file
from needs import absent, need

try:
    from leadline.engine.models.triton_ops import add_rms_norm
except ModuleNotFoundError as error:
    absent(error)

WIDTH, VOCAB, EPS, IN_A_GRAPH = 4096, 151936, 1e-6, 20
SIZES = [8 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20]


def terms(rank: int, rows: int, seed: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn((rows, width), device="cuda", dtype=torch.bfloat16, generator=generator)


def put(fabric: Fabric, which: Sum, value: torch.Tensor) -> None:
    target = fabric.partial(which, len(value))
    assert target is not None
    target.copy_(value)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """Relative error of one rounding to bfloat16 is below 2**-9; a few are allowed."""
    error = float((found.double() - expected).norm() / expected.norm())
    if not error < 4e-3:
        raise SystemExit(f"{what}: relative error {error:.2e}")
    return error


def case(group: RankGroup, rows: int, seed: int, weight: torch.Tensor) -> tuple[Any, ...]:
    """(all ranks' terms, their sum, a residual, that with the sum, that normed), the sums in float64."""
    every = [terms(rank, rows, seed, len(weight)) for rank in range(group.size)]
    total = sum(value.double() for value in every)
    residual = terms(77, rows, seed, len(weight))
    expected = residual.double() + total
    normed = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + EPS) * weight.double()
    return every, total, residual, expected, normed


def check(group: RankGroup, fabric: Fabric, rounds: int) -> None:
    """All ranks draw all ranks' terms, so that each knows the sum."""
    worst = 0.0
    weight = terms(99, 1, 0, fabric.spec.hidden)[0]
    sizes = [1, 2, 3, 7, 64, 65, 256, 511, 512, 513, 1000, fabric.max_tokens]
    for seed, rows in enumerate([rows for rows in sizes if rows <= fabric.max_tokens] * rounds):
        every, total, residual, expected, normed = case(group, rows, seed, weight)
        for two in (False, True):
            fabric.two_shots_from = 0 if two else 1 << 62
            mine = residual.clone()
            put(fabric, Sum.O, every[group.rank])
            x = fabric.add_rms_norm(Sum.O, mine, weight, EPS).clone()
            worst = max(worst, close(x, normed, f"{rows} rows, two shots {two}: normed"))
            own = slice(group.rank, None, group.size) if two else slice(None)
            if len(mine[own]):
                worst = max(worst, close(mine[own], expected[own], f"{rows} rows: residual"))
        put(fabric, Sum.EMBEDDING, every[group.rank])
        worst = max(worst, close(fabric.sum(Sum.EMBEDDING, rows), total, f"{rows} rows: sum"))
        put(fabric, Sum.DOWN, every[group.rank])
        mine = residual.clone()
        fabric.add(Sum.DOWN, mine)
        worst = max(worst, close(mine, expected, f"{rows} rows: add"))
        if rows <= fabric.spec.max_rows:
            parts = [terms(rank, rows, seed, fabric.columns) for rank in range(group.size)]
            part = fabric.logits_part(rows)
            assert part is not None
            part.copy_(parts[group.rank])
            if not torch.equal(fabric.gather_logits(rows, None), torch.cat(parts, 1)[:, :VOCAB]):
                raise SystemExit(f"{rows} rows: gathered wrong columns")
    if group.rank == 0:
        print(f"sums, fused sums and gathers agree with float64, worst relative error {worst:.1e}")


def check_graph(group: RankGroup, fabric: Fabric, replays: int) -> None:
    """Many replays with fresh terms, without a wait in between: no rank may run ahead into memory in use."""
    rows, count = 32, 40
    weight = torch.ones(fabric.spec.hidden, dtype=torch.bfloat16, device="cuda")
    source = terms(group.rank, rows, 5, fabric.spec.hidden)
    state = torch.zeros_like(source)

    def step() -> None:
        for index in range(count):
            which = (Sum.O, Sum.DOWN)[index % 2]
            target = fabric.partial(which, rows)
            assert target is not None
            torch.mul(source, 1.0 + index, out=target)
            fabric.add_rms_norm(which, state, weight, EPS)

    for two in (False, True):
        fabric.two_shots_from = 0 if two else 1 << 62
        graph = capture(step)
        state.zero_()
        for _ in range(replays):
            graph.replay()
        after = state.clone()
        state.zero_()
        for _ in range(replays):
            step()
        own = slice(group.rank, None, group.size) if two else slice(None)
        if not torch.equal(after[own], state[own]):
            raise SystemExit(f"two shots {two}: graph and eager steps differ")
        # No rank may have summed in another order than the others.
        sums = group.all_gather(state[:1].double().sum().view(1, 1))[0]
        if not two and not bool((sums == sums[0]).all()):
            raise SystemExit(f"ranks have different bits: {sums.tolist()}")
    if group.rank == 0:
        print("graph replays and eager steps agree to the bit")


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def microseconds(group: RankGroup, once: Callable[[int], Any], repeats: int = 30) -> float:
    graph = capture(lambda: [once(index) for index in range(IN_A_GRAPH)])
    times = []
    for _ in range(repeats + 3):
        group.least(0)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / IN_A_GRAPH)
    return statistics.median(times[3:])


def torch_buffer(group: RankGroup, size: int) -> tuple[torch.Tensor, str]:
    meeting = group._meeting
    meeting._register()
    memory = c10d._SymmetricMemory.empty_strided_p2p(
        (size // 2,), (1,), torch.bfloat16, group.device, meeting._name
    )
    c10d._SymmetricMemory.rendezvous(memory, meeting._name)
    return memory, meeting._name


def table(group: RankGroup, fabric: Fabric | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    weight = terms(1, 1, 1)[0]
    try:
        buffer, name = torch_buffer(group, SIZES[-1])
    except Exception as error:
        print(f"rank {group.rank}: no torch symmetric memory: {error!r}", flush=True)
        buffer = None
    for size in SIZES:
        rows = size // (2 * WIDTH)
        plain, residual = terms(group.rank, rows, 1), terms(7, rows, 2)
        ways: dict[str, Callable[[int], Any]] = {
            "nccl": lambda _: group.all_reduce(plain),  # noqa: B023
            "nccl+norm": lambda _: add_rms_norm(group.all_reduce(plain), residual, weight, EPS),  # noqa: B023
        }
        if buffer is not None:
            part, out = buffer[: size // 2], torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
            ways["torch one"] = lambda _: torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", name, out)  # noqa: B023
            ways["torch two"] = lambda _: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", name)  # noqa: B023
        if fabric is not None and rows <= fabric.max_tokens:

            def joined(index: int, two: bool) -> None:
                fabric.two_shots_from = 0 if two else 1 << 62
                fabric.add_rms_norm((Sum.O, Sum.DOWN)[index % 2], residual, weight, EPS)  # noqa: B023

            ways["sum"] = lambda index: fabric.sum((Sum.O, Sum.DOWN)[index % 2], rows)  # noqa: B023
            ways["one+norm"] = lambda index: joined(index, False)
            ways["two+norm"] = lambda index: joined(index, True)
        found = {}
        for way, once in ways.items():
            plain.zero_()
            residual.zero_()
            try:
                found[way] = microseconds(group, once)
            except Exception as error:
                print(f"rank {group.rank}: {way} at {size}: {error!r}"[:600], flush=True)
        if group.rank == 0:
            print(f"{size:>9} " + "  ".join(f"{way} {us:.1f}" for way, us in found.items()), flush=True)
        lines += [
            result_line(
                f"all-reduce {size >> 10} Ki, {way}",
                us,
                "us",
                model_shape=None,
                attention=None,
                peer=found["nccl+norm" if way.endswith("norm") else "nccl"],
                gpus=group.size,
                command=f"python3 benchmarks/gpu_allreduce.py --tp {group.size}",
            )
            for way, us in found.items()
        ]
    return lines


def run(options: argparse.Namespace) -> None:
    device = device_of(options.rank)
    torch.cuda.set_device(device)
    group = RankGroup(options.fd, options.rank, options.tp, device)
    print(f"rank {options.rank}: group is up", flush=True)
    width = WIDTH // 4 if options.check else WIDTH  # narrow rows: more of them fit the fabric than programs
    fabric = make_collectives(group, FabricSpec(width, VOCAB, torch.bfloat16, 8192, 256)).fabric
    print(f"rank {options.rank}: fabric {'is up' if fabric else 'IS MISSING'}", flush=True)
    with torch.inference_mode():
        if fabric is not None:
            check(group, fabric, 2)
            check_graph(group, fabric, options.replays)
        elif options.check:
            raise SystemExit("there is no fabric to check")
        lines = [] if options.check else table(group, fabric, options)
    if options.json and options.rank == 0:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    group.least(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--replays", type=int, default=20, help="of a graph of 40 sums, by --check")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    parser.add_argument("--timeout", type=int, default=120, help="seconds after which all stacks are printed")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    need(gpus=2)
    if options.rank >= 0:
        faulthandler.dump_traceback_later(options.timeout, exit=True)
        run(options)
        sys.stdout.flush()
        os._exit(0)
    fd = unnamed_file()
    command = [sys.executable, *sys.argv, "--fd", str(fd), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], pass_fds=[fd]) for rank in range(options.tp)]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
