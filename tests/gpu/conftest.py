"""GPU tests share the case generators that live beside the CPU tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "attention"))
