"""Reads YAML and JSON files that people write, and reports where they are wrong.

Used for the configuration and for the keys. Messages name the file, the line or the field, and
never quote a value out of the file by accident: it may be a secret.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from leadline.gateway.errors import ConfigError

__all__ = ["Strict", "convert", "parse_document", "read_document"]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Misspelled settings are errors, not silence."""


def read_document(path: str | Path) -> Any:
    """What a YAML or JSON file holds. Raises ConfigError naming the file and, for bad syntax, the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Any:
    """As read_document, from a text. JSON is tried first, for speed; an empty text is an empty mapping."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        pass
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark is not None else ""
        # Not the error's own text: it quotes the line.
        problem = getattr(error, "problem", None) or "bad syntax"
        raise ConfigError(f"{name}{place}: not YAML: {problem}") from None
    return {} if document is None else document


StructT = TypeVar("StructT", bound=msgspec.Struct)


def convert(value: object, kind: type[StructT], path: str) -> StructT:
    """`value` as a `kind`. Raises ConfigError that begins with the path of the field at fault, which lies
    under `path`. Items of lists are not numbered in what lies under it: convert them one by one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, inner = str(error).partition(" - at `$")
        place = (path + inner.rstrip("`")).lstrip(".")
        raise ConfigError(f"{place}: {problem}" if place else problem) from None
