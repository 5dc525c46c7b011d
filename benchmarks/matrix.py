"""`leadline bench matrix`, recorded: rows in results.jsonl, table and plot in benchmarks/plots.

    python benchmarks/matrix.py                                                    SmolLM2 on this machine
    PYTHONPATH=protocol:engine:cli python3 benchmarks/matrix.py --shape Qwen3-8B --json lines.jsonl --out DIR
                                                                                   random weights, on a GPU

With --json lines go there and nothing else is written to but --out. The ratio of a row `on` is its value over
`off`'s. Other options as for `leadline bench matrix --help`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from leadline.cli.main import main as command
from leadline.cli.matrix.table import markdown, rows


def main() -> int:
    arguments = sys.argv[1:]
    shape, lines = _take(arguments, "--shape"), _take(arguments, "--json")
    out = Path(_take(arguments, "--out") or Path(__file__).parent / "plots")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = []
        if shape is not None:
            from gpu_models import SHAPES, write_model

            target = folder / shape
            target.mkdir()
            write_model(target, SHAPES[shape], "bfloat16")
            model = [str(target), "--load-format", "dummy", "--served-name", shape]
        result_file = folder / "result.json"
        name = f"matrix_{(shape or 'smollm2').lower().replace('.', '_')}"
        out.mkdir(parents=True, exist_ok=True)
        code = command(
            [
                *("bench", "matrix", *model, "--json", str(result_file)),
                *("--plot", str(out / f"{name}.png"), *arguments),
            ]
        )
        if code:
            return code
        result = json.loads(result_file.read_text(encoding="utf-8"))
    (out / f"{name}.md").write_text(markdown(result), encoding="utf-8")
    if lines is None:
        from record import record

        for workload, value, unit, ratio in rows(result):
            record(workload, value, unit, peer_ratio=ratio)
        return 0
    from gpu_results import result_line

    with open(lines, "a", encoding="utf-8") as file:
        for workload, value, unit, ratio in rows(result):
            line = result_line(workload, value, unit, model_shape=shape or "smollm2", attention="")
            line |= {"value": float(f"{value:.6g}"), "peer_ratio": ratio}
            file.write(json.dumps(line) + "\n")
    return 0


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
