"""docs/models.md names what the engine supports, and the sizes it gives are those of the configs."""

from __future__ import annotations

import re
from pathlib import Path

from leadline.engine.models.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()

SHAPES = {  # layers, KV heads, head size
    "Qwen3-8B": (36, 8, 128),
    "Qwen3-30B-A3B": (48, 4, 128),
    "Llama-3.1-70B": (80, 8, 128),
}


def test_every_architecture_is_on_the_page_and_no_other() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(FAMILIES)


def test_the_cache_takes_what_the_page_says() -> None:
    for name, (layers, kv_heads, head_dim) in SHAPES.items():
        gigabytes = 2 * layers * kv_heads * head_dim * 2 * 32768 / 1e9
        (said,) = re.findall(rf"^\| {re.escape(name)} \| [^|]* \| ([\d.]+) GB", PAGE, re.MULTILINE)
        assert abs(float(said) - gigabytes) < 0.06, name
