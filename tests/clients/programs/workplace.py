"""What every client program gets and does: a folder with a file, two tools, a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INSTRUCTIONS = "You keep the notes of a railway station. Read a file before you edit it."
MODEL = "smollm2"


@dataclass(frozen=True)
class Job:
    """One client's task."""

    kind: str
    url: str
    """Of the gateway, without /v1."""
    folder: str
    prompt: str

    def read_file(self, path: str) -> str:
        """Return the text of a file."""
        return (Path(self.folder) / path).read_text()

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file."""
        file = Path(self.folder) / path
        text = file.read_text()
        if text.count(old) != 1:
            return f"{old!r} occurs {text.count(old)} times"
        file.write_text(text.replace(old, new))
        return "edited"


READ_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
EDIT_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "required": ["path", "old", "new"],
    "additionalProperties": False,
}
TOOLS = {
    "read_file": ("Return the text of a file.", READ_SCHEMA),
    "edit_file": ("Replace a text in a file.", EDIT_SCHEMA),
}
