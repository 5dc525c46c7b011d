"""Time the products of small decode steps on one GPU: cuBLAS with separate small kernels, and the fused ways.

    PYTHONPATH=engine python3 benchmarks/gpu_skinny.py [--tune]

Each row is one product of the Qwen3-0.6B or 8B shape: microseconds of a launch in a graph over LAYERS
different weights (so that they come from memory, not from L2), and what its bytes take at the copy rate.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch

from leadline.engine.models import triton_ops
from leadline.engine.models.skinny_shapes import Shape
from leadline.engine.models.triton_gemv import gemv
from leadline.engine.models.triton_skinny import Workspace, skinny

LAYERS = 24
COPY_RATE = 4.28e12
SHAPES = {
    "0.6B qkv": (4096, 1024, False, False),
    "0.6B o": (1024, 2048, False, True),
    "0.6B gate-up": (6144, 1024, True, False),
    "0.6B down": (1024, 3072, False, True),
    "8B qkv": (6144, 4096, False, False),
    "8B o": (4096, 4096, False, True),
    "8B gate-up": (24576, 4096, True, False),
    "8B down": (4096, 12288, False, True),
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

    def __init__(self, outs: int, width: int, gated: bool, adds: bool, rows: int) -> None:
        self.gated, self.adds, self.width = gated, adds, width
        self.num_out = outs // 2 if gated else outs
        self.weights = (torch.randn((LAYERS, outs, width), device="cuda") * width**-0.5).bfloat16()
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

    def tuned(self) -> str:
        """The best cuts by trial."""
        found = []
        for size, depth, splits, stages, near in itertools.product(
            (32, 64), (64, 128), (1, 2, 4, 6), (3, 4), (0, 128, 256, 512)
        ):
            programs, length = -(-self.num_out // size) * splits, self.width // splits
            if self.width % splits or length < near or (length - near) % depth or not 64 <= programs <= 800:
                continue
            if (size * (1 + self.gated) + len(self.x)) * depth * stages * 2 > 110_000:
                continue
            shape = Shape(size, depth, splits, stages, 4, prefetch=False, near=near)
            cut = (size, depth, splits, stages, near)
            found.append((seconds(lambda i, shape=shape: self.few(i, shape)), cut))
        return "  ".join(f"{time * 1e6:.2f} {cut}" for time, cut in sorted(found)[:4])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--only", default="")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    for name, (outs, width, gated, adds) in SHAPES.items():
        if not name.startswith(options.only):
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
