"""How triton_skinny.py cuts a product of few rows into programs, by the shape of its weights."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shape"]


@dataclass(slots=True, frozen=True)
class Shape:
    """How a product is cut; see `skinny_kernel` in triton_skinny.py."""

    outs: int = 32
    depth: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4
    prefetch: bool = True
    near: int = 0
    """Columns loaded before the kernel waits for its input; a power of two, or 0."""

    @staticmethod
    def of(num_out: int, width: int, gated: bool, rows: int = 32) -> Shape:
        """The cut found by trial on an H200 (benchmarks/gpu_skinny.py --tune) for the shapes in `_CUTS`.

        Otherwise many weights fill the GPU with programs of whole rows, and few weights are cut into about
        one program an SM, if the width can be split that far.
        """
        known = (_CUTS if rows <= 32 else _CUTS_64).get((num_out, width, gated))
        if known is not None:
            return known
        if num_out * width * (1 + gated) > _MANY_WEIGHTS:
            outs = 32 if gated else 64
            depth, splits = (128 if width % 128 == 0 else 64), 1
            while -(-num_out // outs) * splits < 90 and width % (2 * splits * depth) == 0:
                splits *= 2
            return Shape(outs, depth, splits, 3 if gated else 4, 4, prefetch=False)
        outs = 64 if num_out >= 2048 else 32
        depth = 128 if outs == 32 and width % 128 == 0 else 64
        splits = 2 if gated and outs == 64 and width % (2 * depth) == 0 else 1
        while -(-num_out // outs) * splits < (64 if outs == 64 else 96) and (
            width % (2 * splits * depth) == 0
        ):
            splits *= 2
        return Shape(outs, depth, splits, 5, 4, prefetch=not gated)


_MANY_WEIGHTS = 8 << 20
"""With more than these, programs of whole rows fill the GPU."""
_CUTS = {
    # Qwen3-0.6B: qkv, o, gate and up, down
    (4096, 1024, False): Shape(64, 128, 2, 3, 4, prefetch=False, near=512),
    (1024, 2048, False): Shape(32, 128, 4, 4, 4, prefetch=False, near=512),
    (3072, 1024, True): Shape(64, 128, 2, 3, 8, prefetch=False, near=512),
    (1024, 3072, False): Shape(32, 128, 6, 3, 4, prefetch=False, near=512),
    # Qwen3-8B, Llama 8B
    (6144, 4096, False): Shape(64, 128, 1, 4, 4, prefetch=False, near=256),
    (4096, 4096, False): Shape(64, 128, 2, 4, 4, prefetch=False, near=256),
    (12288, 4096, True): Shape(32, 128, 1, 3, 4, prefetch=False, near=128),
    (4096, 12288, False): Shape(64, 128, 4, 3, 4, prefetch=False, near=128),
    # their heads
    (151936, 1024, False): Shape(64, 64, 1, 5, 4, prefetch=False),
    (151936, 4096, False): Shape(64, 64, 1, 5, 4, prefetch=False),
}
"""Up to 32 rows: outputs, width and whether gated."""
_CUTS_64 = {
    # Qwen3-0.6B: qkv, o, gate and up, down
    (4096, 1024, False): Shape(64, 128, 1, 4, 4, prefetch=False),
    (1024, 2048, False): Shape(64, 128, 4, 4, 8, prefetch=False),
    (3072, 1024, True): Shape(32, 128, 1, 5, 4, prefetch=False, near=128),
    (1024, 3072, False): Shape(64, 128, 6, 4, 8, prefetch=False),
    # Qwen3-8B, Llama 8B
    (6144, 4096, False): Shape(64, 128, 1, 4, 4, prefetch=False),
    (4096, 4096, False): Shape(64, 128, 2, 4, 4, prefetch=False),
    (12288, 4096, True): Shape(32, 64, 1, 4, 4, prefetch=False, near=128),
    (4096, 12288, False): Shape(64, 128, 2, 4, 4, prefetch=False),
    # their heads
    (151936, 1024, False): Shape(128, 64, 1, 3, 4, prefetch=False),
    (151936, 4096, False): Shape(128, 128, 1, 4, 8, prefetch=False),
}
"""The same for 33 to 64 rows."""
