"""GPU tests share the case generators and packers of the CPU tests and the model folders of the benchmarks.

They need the GPU to themselves: some read how much of its memory is free (no pytest-xdist).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT / "tests" / "engine" / "attention"),
    str(ROOT / "tests" / "engine" / "models"),
    str(ROOT / "benchmarks"),
]
