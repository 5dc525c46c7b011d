"""Put the gateway's settings into the chart's values.schema.json, so that helm refuses a misspelled one.

python charts/values_schema.py            write it
python charts/values_schema.py --check    fail when the file is not what this makes
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from leadline.gateway.config.settings import GatewayConfig

FILE = Path(__file__).parent / "leadline" / "values.schema.json"


def settings_schema() -> dict[str, Any]:
    """JSON schema of `gateway.config`, without references."""
    (made,), parts = msgspec.json.schema_components((GatewayConfig,), ref_template="{name}")
    schema: dict[str, Any] = _plain(made, parts)
    # In a file, the address alone will do for a pod.
    service = schema["properties"]["services"]["items"]["properties"]
    service["pods"]["items"] = {"anyOf": [{"type": "string", "minLength": 1}, service["pods"]["items"]]}
    return schema


def _plain(node: Any, parts: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_plain(one, parts) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(parts[node["$ref"]], parts)
    left_out = ("default", "title", "description", *(() if node.get("required") else ("required",)))
    if "properties" in node:
        properties = {name: _plain(one, parts) for name, one in node["properties"].items()}
        rest = {key: value for key, value in node.items() if key not in (*left_out, "properties")}
        return {**_plain(rest, parts), "properties": properties}
    return {key: _plain(value, parts) for key, value in node.items() if key not in left_out}


def text() -> str:
    """The whole file."""
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    schema["properties"]["gateway"]["properties"]["config"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write charts/leadline/values.schema.json.")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    made = text()
    if not args.check:
        FILE.write_text(made, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != made:
        print(f"{FILE} lacks settings of the gateway; run: python charts/values_schema.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
