"""docs/models.md names what the engine supports, and the sizes it gives are those of the configs."""

from __future__ import annotations

import re
from pathlib import Path

from leadline.engine.config import REASONING_FORMATS
from leadline.engine.frontend.tool_formats import FORMATS
from leadline.engine.models.families import FAMILIES, WRAPPERS

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()

SHAPES = {  # layers, KV heads, head size
    "Qwen3-8B": (36, 8, 128),
    "Qwen3-30B-A3B": (48, 4, 128),
    "Llama-3.1-70B": (80, 8, 128),
}


def rows_of(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_every_architecture_and_tool_format_is_on_the_page_and_no_other() -> None:
    architectures, _, rest = PAGE.partition("## Tool calls")
    formats, _, rest = rest.partition("## Reasoning")
    thoughts, _, sizes = rest.partition("## Memory")
    assert set(rows_of(architectures)) == {*FAMILIES, *WRAPPERS}
    assert rows_of(formats) == sorted(tool_format.name for tool_format in FORMATS)
    assert set(rows_of(thoughts)) == set(REASONING_FORMATS) - {"auto", "none"}
    assert not rows_of(sizes)


def test_the_cache_takes_what_the_page_says() -> None:
    for name, (layers, kv_heads, head_dim) in SHAPES.items():
        gigabytes = 2 * layers * kv_heads * head_dim * 2 * 32768 / 1e9
        (said,) = re.findall(rf"^\| {re.escape(name)} \| [^|]* \| ([\d.]+) GB", PAGE, re.MULTILINE)
        assert abs(float(said) - gigabytes) < 0.06, name
