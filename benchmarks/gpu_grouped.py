"""Time products with weights in groups of columns (grouped.py) on one GPU, by kind and number of rows.

    PYTHONPATH=engine python3 benchmarks/gpu_grouped.py [--kinds w4a16,fp8-block] [--rows 1,32] [--tune]

Each row is one product of the Qwen3-8B shape: microseconds of a launch in a graph over LAYERS different
weights (so that they come from memory, not from L2), what its bytes take at the copy rate, cuBLAS in 16 bits,
and unpacking the weight before cuBLAS. --tune tries cuts and prints the four best of each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator

import torch

from gpu_models import QUANTIZED
from leadline.engine.models.grouped import GroupedWeight
from leadline.engine.models.quantized_config import read_quantization
from needs import absent, need

try:
    from triton.runtime.errors import OutOfResources

    from gpu_skinny import COPY_RATE, LAYERS, seconds
    from leadline.engine.models import triton_grouped
except ModuleNotFoundError as error:
    absent(error)

SHAPES = {
    "qkv": (6144, 4096, False, False),
    "o": (4096, 4096, False, True),
    "gate-up": (24576, 4096, True, False),
    "down": (4096, 12288, False, True),
}
"""rows and columns of the weight, gated, adds to the residual"""


class Case:
    """One product at one number of rows."""

    def __init__(self, kind: str, outs: int, width: int, gated: bool, adds: bool, rows: int) -> None:
        config = read_quantization({"quantization_config": QUANTIZED[kind]})
        assert config is not None
        generator = torch.Generator("cuda").manual_seed(0)
        self.weights = []
        for _ in range(LAYERS):
            weight = GroupedWeight(outs, width, config.kinds[0], torch.bfloat16, torch.device("cuda"))
            weight.fill_randomly(slice(0, outs), width**-0.5, generator)
            self.weights.append(weight)
        self.plain_weights = [torch.randn((outs, width), device="cuda").bfloat16() for _ in range(LAYERS)]
        self.gated, self.adds, self.rows = gated, adds, rows
        self.x = torch.randn((rows, width), device="cuda").bfloat16()
        self.norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.zeros((rows, outs), device="cuda", dtype=torch.bfloat16)

    @property
    def floor(self) -> float:
        """Microseconds that the bytes take."""
        return 1e6 * (self.weights[0].nbytes + self.x.nbytes + self.residual.nbytes) / COPY_RATE

    def here(self, i: int, cut: tuple[int, ...] | None = None) -> object:
        if self.rows > 1 and cut is None:
            return self.weights[i](self.x)
        if self.rows > 1:
            return triton_grouped.product(self.x, self.weights[i], cut=cut)
        if self.adds:
            return triton_grouped.gemv(self.x, self.weights[i], residual=self.residual, cut=cut)
        return triton_grouped.gemv(self.x, self.weights[i], norm=(self.norm, 1e-6), gated=self.gated, cut=cut)

    def plain(self, i: int) -> object:
        return torch.mm(self.x, self.plain_weights[i].t())

    def unpacked(self, i: int) -> object:
        return torch.mm(self.x, triton_grouped.unpack(self.weights[i], torch.bfloat16).t())

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """Those worth a trial."""
        if self.rows == 1:
            yield from itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8, 16), (2, 4, 8))
            return
        tiles = sorted({max(16, 1 << (min(self.rows, limit) - 1).bit_length()) for limit in (64, 128, 256)})
        for outs, tile, stages, warps in itertools.product((16, 32, 64, 128), tiles, (2, 3, 4, 5, 6), (4, 8)):
            if outs * tile <= 4096 * warps and not (outs == 16 and warps == 8):
                yield outs, tile, stages, warps

    def tuned(self) -> str:
        """The best cuts by trial."""
        found = []
        for cut in self.cuts():
            with contextlib.suppress(OutOfResources):
                found.append((seconds(lambda i, cut=cut: self.here(i, cut)), cut))
        return "  ".join(f"{time * 1e6:.2f} {cut}" for time, cut in sorted(found)[:4])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--kinds", type=names, default=["w4a16", "fp8-block"])
    parser.add_argument(
        "--rows", type=lambda s: [int(n) for n in s.split(",")], default=[1, 32, 64, 256, 1024]
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    need(gpus=1)
    for kind, (name, shape), rows in itertools.product(options.kinds, SHAPES.items(), options.rows):
        if options.only not in name:
            continue
        case = Case(kind, *shape, rows)
        print(
            f"{kind} {name} {rows} rows: floor {case.floor:.1f} us, here {seconds(case.here) * 1e6:.2f}, "
            f"16 bits {seconds(case.plain) * 1e6:.2f}, unpacked first {seconds(case.unpacked) * 1e6:.2f}",
            flush=True,
        )
        if options.tune:
            print("    ", case.tuned(), flush=True)


if __name__ == "__main__":
    main()
