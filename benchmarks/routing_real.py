"""Prefix routing against random on real engines: `leadline bench routing`, recorded in results.jsonl.

Three engines of SmolLM2 on this machine's CPU, the same seeded conversations for both policies. The ratio in
a row of prefix is its value over random's. Takes about four minutes on two cores; arguments go on to the
command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

ROWS = [
    ("hit rate", "share", ("hit_rate",)),
    ("TTFT mean", "s", ("ttft_seconds", "mean")),
    ("TTFT p90", "s", ("ttft_seconds", "p90")),
    ("requests/s", "requests/s", ("requests_per_second",)),
    ("tokens/s", "tokens/s", ("tokens_per_second",)),
    ("engines' CPU a request", "s", ("engine_cpu_seconds_per_request",)),
]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        command = [sys.executable, "-m", "leadline.cli.main", "bench", "routing", "--json", str(path)]
        code = subprocess.run([*command, *sys.argv[1:]], check=False).returncode
        if code or not path.exists():  # --help measures nothing
            return code
        result = json.loads(path.read_text(encoding="utf-8"))
    where = f"bench routing, {result['model']} x{result['replicas']}"
    record(f"{where}: prompt tokens sent before", result["ceiling_hit_rate"], "share")
    base_name = next(iter(result["policies"]))
    for policy, row in result["policies"].items():
        for label, unit, keys in ROWS:
            value, base = row, result["policies"][base_name]
            for key in keys:
                value, base = value[key], base[key]
            ratio = None if policy == base_name or not base else value / base
            record(f"{where}, {policy}: {label}", value, unit, peer_ratio=ratio)
    return 0


if __name__ == "__main__":
    sys.exit(main())
