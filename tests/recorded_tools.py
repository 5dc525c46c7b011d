"""Tools as real clients and MCP servers send them: names and schemas, with texts of our own for theirs.

`tests/engine/frontend/recorded_tools` has a file for each client. tests/clients compares those of the clients
that it runs; `tests/clients/programs/mcp_tools.py` writes those of MCP servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "dumped", "loaded", "reworded"]

FOLDER = Path(__file__).parent / "engine" / "frontend" / "recorded_tools"
_TEXTS = {"description", "title", "$comment"}


def reworded(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions among tools of any API, as name and schema, sorted by name."""
    found = []
    for tool in tools:
        function = tool.get("function", tool)
        schema = next(
            (function[key] for key in ("parameters", "input_schema", "inputSchema") if key in function), None
        )
        if schema is not None:
            found.append(
                {"name": function["name"], "strict": bool(function.get("strict")), "schema": _plain(schema)}
            )
    return sorted(found, key=lambda tool: str(tool["name"]))


def dumped(tools: list[dict[str, Any]]) -> str:
    """The text of a file: a line for each tool."""
    return "[\n" + ",\n".join(json.dumps(tool) for tool in tools) + "\n]\n"


def loaded() -> dict[str, list[dict[str, Any]]]:
    """Client or server → its tools."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "A text" if key in _TEXTS and isinstance(item, str) else _plain(item)
        for key, item in value.items()
        if key != "examples"
    }
