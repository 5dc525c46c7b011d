"""Time the products of small decode steps on one GPU: cuBLAS with separate small kernels, and the fused ways.

    PYTHONPATH=engine python3 benchmarks/gpu_skinny.py [--tune [--compilers 14]]

--tune tries cuts (skinny_shapes.py) and prints the four best of each; processes compile them beforehand.
Each row is one product of the Qwen3-0.6B or 8B shape: microseconds of a launch in a graph over LAYERS
different weights (so that they come from memory, not from L2), and what its bytes take at the copy rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
from collections.abc import Callable

import torch

from leadline.engine.models.skinny_shapes import Shape
from needs import absent, need

try:
    from triton.runtime.errors import OutOfResources

    from leadline.engine.models import triton_ops
    from leadline.engine.models.triton_gemv import gemv
    from leadline.engine.models.triton_skinny import Workspace, skinny
except ModuleNotFoundError as error:
    absent(error)

LAYERS = 24
COPY_RATE = 4.28e12
SHAPES = {
    "0.6B qkv": (4096, 1024, False, False),
    "0.6B o": (1024, 2048, False, True),
    "0.6B gate-up": (6144, 1024, True, False),
    "0.6B down": (1024, 3072, False, True),
    "0.6B head": (151936, 1024, False, False),
    "8B qkv": (6144, 4096, False, False),
    "8B o": (4096, 4096, False, True),
    "8B gate-up": (24576, 4096, True, False),
    "8B down": (4096, 12288, False, True),
    "8B head": (151936, 4096, False, False),
}
"""rows and columns of the weight, gated, adds to the residual"""


def seconds(step: Callable[[int], object]) -> float:
    """Median of a launch: step(i) with weight i, all of them in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAYERS):
            step(i)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / LAYERS)
    return statistics.median(times[2:])


class Case:
    """One product at one number of rows, each way as a step of a graph."""

    def __init__(
        self, outs: int, width: int, gated: bool, adds: bool, rows: int, layers: int = LAYERS
    ) -> None:
        self.gated, self.adds, self.width, self.rows = gated, adds, width, rows
        self.num_out = outs // 2 if gated else outs
        self.weights = torch.empty((layers, outs, width), dtype=torch.bfloat16, device="cuda")
        self.weights.normal_(std=width**-0.5)
        self.space = Workspace(self.num_out if adds else width, torch.bfloat16, torch.device("cuda"))
        self.space.partial = torch.empty(1 << 24, dtype=torch.float32, device="cuda")
        self.norm = torch.ones(max(width, self.num_out), device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn((rows, width), device="cuda").bfloat16()
        self.residual = torch.randn((rows, self.num_out), device="cuda").bfloat16()

    def plain(self, i: int) -> object:
        y = torch.mm(self.x, self.weights[i].t())
        if self.gated:
            return triton_ops.silu_and_mul(y)
        norm = self.norm[: self.num_out]
        return triton_ops.add_rms_norm(y, self.residual, norm, 1e-6) if self.adds else y

    def few(self, i: int, shape: Shape | None = None) -> object:
        if self.adds:
            return skinny(
                self.x,
                self.weights[i],
                self.space,
                residual=self.residual,
                next_norm=self.norm[: self.num_out],
                shape=shape,
            )
        return skinny(self.x, self.weights[i], self.space, norm=True, gated=self.gated, shape=shape)

    def one(self, i: int, cut: tuple[int, int, int] | None = None) -> object:
        weight = self.weights[i]
        if self.adds:
            return gemv(self.x, weight, residual=self.residual, cut=cut)
        return gemv(self.x, weight, norm=(self.norm[: self.width], 1e-6), gated=self.gated, cut=cut)

    def tuned_one(self) -> str:
        """The best cuts of one row's product by trial."""
        found = []
        for cut in itertools.product((1024, 2048, 4096), (1, 2, 4), (4, 8)):
            tile, outs, _ = cut
            if tile >= 2 * self.width or not 1024 <= tile * outs * (1 + self.gated) <= 8192:
                continue
            found.append((seconds(lambda i, cut=cut: self.one(i, cut)), cut))
        return "  ".join(f"{time * 1e6:.2f} {cut}" for time, cut in sorted(found)[:4])

    def cuts(self) -> list[Shape]:
        """Those worth a trial."""
        found = []
        tile = max(16, 1 << (self.rows - 1).bit_length())
        for outs, depth, splits, stages, warps, near in itertools.product(
            (32, 64, 128), (64, 128), (1, 2, 4, 6), (3, 4, 5), (4, 8), (0, 128)
        ):
            programs, length = -(-self.num_out // outs) * splits, self.width // splits
            if self.width % splits or length < near or (length - near) % depth or programs < 60:
                continue
            if programs > 800 and splits > 1:
                continue
            halves = 1 + self.gated
            if (outs * halves + tile) * depth * stages * 2 > 200_000:
                continue
            if outs * halves * tile > 4096 * warps or outs * halves * near > 8192 * warps:
                continue  # more accumulators, or columns held in registers, than a thread has
            if (outs == 32 and warps == 8) or (stages == 5 and depth == 128 and outs > 32):
                continue
            found.append(Shape(outs, depth, splits, stages, warps, prefetch=False, near=near))
        return found

    def tuned(self) -> str:
        """The best cuts by trial."""
        found = []
        for cut in self.cuts():
            with contextlib.suppress(OutOfResources):
                found.append((seconds(lambda i, cut=cut: self.few(i, cut)), cut))
        best = sorted(found, key=lambda pair: pair[0])[:4]
        return "  ".join(
            f"{time * 1e6:.2f} {(c.outs, c.depth, c.splits, c.stages, c.warps, c.near)}" for time, c in best
        )


def compile_cuts(job: tuple[str, int, int, int]) -> None:
    """Launch each `count`-th cut of a case once, from the `first` on: that fills Triton's cache on disk."""
    name, rows, first, count = job
    case = Case(*SHAPES[name], rows, layers=1)
    for cut in case.cuts()[first::count]:
        with contextlib.suppress(OutOfResources):
            case.few(0, cut)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--only", default="")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile for --tune")
    options = parser.parse_args()
    need(gpus=1)
    if options.tune:
        jobs = [
            (name, rows, first, 4)
            for first in range(4)
            for name in SHAPES
            for rows in options.rows
            if rows > 1 and options.only in name
        ]
        with multiprocessing.get_context("spawn").Pool(options.compilers) as pool:
            pool.map(compile_cuts, jobs, chunksize=1)
    for name, (outs, width, gated, adds) in SHAPES.items():
        if options.only not in name:
            continue
        for rows in options.rows:
            case = Case(outs, width, gated, adds, rows)
            floor = 2e6 * (outs * width + rows * (outs + width)) / COPY_RATE
            fused, plain = seconds(case.one if rows == 1 else case.few), seconds(case.plain)
            print(
                f"{name} {rows} rows: floor {floor:.1f} us, cuBLAS and small kernels {plain * 1e6:.2f}, "
                f"fused {fused * 1e6:.2f}",
                flush=True,
            )
            if options.tune:
                print("    ", case.tuned() if rows > 1 else case.tuned_one(), flush=True)


if __name__ == "__main__":
    main()
