"""Where a JSON value ends in a stream of characters, without parsing it.

Owns the three bits of state that take: nesting depth, inside a string or not, after a backslash or not.
"""

from __future__ import annotations

__all__ = ["JsonScanner", "partial_suffix"]


class JsonScanner:
    """Fed characters from the first brace or bracket on."""

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self.in_string = False

    def feed(self, char: str) -> bool:
        """Take one character; True when it closes the outermost brace or bracket."""
        if self._escaped:
            self._escaped = False
        elif self.in_string:
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that `text` ends with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
