"""`leadline bench matrix`, recorded: rows in results.jsonl, table, plot and raw numbers in benchmarks/plots.

    python benchmarks/matrix.py                                     SmolLM2 on this machine
    PYTHONPATH=protocol:engine:cli python3 benchmarks/matrix.py     random weights, on a GPU
        --shape Qwen3-8B --json lines.jsonl --out DIR
        --requests 64 --prompt-tokens 1024 --output-tokens 128 --seconds 200

With --json lines go there, and only --out is written to beside it. The ratio of a row `on` is its value over
`off`'s. Other options as for `leadline bench matrix --help`. The numbers lie in --out from the first
technique on, and what a run that broke off has measured is recorded.

Random weights say nothing of how many drafts are accepted: what speculation brings there is what the share
beside it brings.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from leadline.cli.matrix.table import markdown, plot, rows


def main() -> int:
    arguments = sys.argv[1:]
    shape, lines = _take(arguments, "--shape"), _take(arguments, "--json")
    out = Path(_take(arguments, "--out") or Path(__file__).parent / "plots")
    out.mkdir(parents=True, exist_ok=True)
    name = f"matrix_{(shape or 'smollm2').lower().replace('.', '_')}"
    numbers = out / f"{name}.json"
    numbers.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = []
        if shape is not None:
            from gpu_models import SHAPES, write_model

            target = Path(folder, shape)
            target.mkdir()
            write_model(target, SHAPES[shape], "bfloat16")
            model = [str(target), "--load-format", "dummy", "--served-name", shape]
        # In a process of its own: one that ends at a hang must not take the recording with it.
        command = [sys.executable, "-m", "leadline.cli.main", "bench", "matrix", *model]
        code = subprocess.run([*command, "--json", str(numbers), *arguments], check=False).returncode
    if not numbers.exists():
        return code
    result = json.loads(numbers.read_text(encoding="utf-8"))
    (out / f"{name}.md").write_text(markdown(result), encoding="utf-8")
    _record(result, shape or "smollm2", lines)
    plot(result, out / f"{name}.png")
    return code


def _record(result: dict, shape: str, lines: str | None) -> None:
    if lines is None:
        from record import record

        for workload, value, unit, ratio in rows(result):
            record(workload, value, unit, peer_ratio=ratio)
        return
    from gpu_results import result_line

    with open(lines, "a", encoding="utf-8") as file:
        for workload, value, unit, ratio in rows(result):
            line = result_line(workload, value, unit, model_shape=shape, attention="")
            line |= {"value": float(f"{value:.6g}"), "peer_ratio": ratio}
            file.write(json.dumps(line) + "\n")


def _take(arguments: list[str], option: str) -> str | None:
    """Remove `option VALUE` from the arguments; its value."""
    if option not in arguments:
        return None
    at = arguments.index(option)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


if __name__ == "__main__":
    sys.exit(main())
