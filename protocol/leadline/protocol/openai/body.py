"""Decoding of request bodies: JSON to a request type, or one typed error that names the field and its value.

Whole numbers written as `3.0`, as the JSON writers of some languages do, are integers. A valid body pays
nothing for that, nor for good messages: both start when the decoder refuses the body.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar, get_type_hints

import msgspec

__all__ = ["InvalidBody", "decode_body", "encode_body"]

T = TypeVar("T")

# "… - at `$.messages[0].content`", and for the key of a mapping "… - at `key` in `$.logit_bias`".
_AT = re.compile(r" - at (`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_PART_TYPE = re.compile(r"(?:messages\[\d+\]\.content|system)\[\d+\](?:\.content\[\d+\])?\.type")
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\)(?:\\\\)*(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MOST_REPAIRS = 16
_MOST_ENTRIES = 1000
_LONGEST_SHOWN = 64


class InvalidBody(ValueError):
    """A body that is no JSON, or whose JSON is not the request it should be: answer it with status 400.

    `param` is the path of the field at fault (`messages[0].content`), or None where there is none.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def decode_body(body: bytes, kind: type[T]) -> T:
    """The request of type `kind` in `body`. Unknown fields are ignored. Raises InvalidBody."""
    decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _second_reading(body, kind, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(_no_json(body, error)) from error
    except RecursionError as error:
        raise InvalidBody("the body is nested too deeply") from error


_encoder = msgspec.json.Encoder()


def encode_body(message: msgspec.Struct) -> bytes:
    """`message` as JSON text."""
    return _encoder.encode(message)


@lru_cache(maxsize=64)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _second_reading(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """The request with integers for whole floats where only that was wrong. Raises InvalidBody."""
    try:
        plain = msgspec.json.decode(body)
        for _ in range(_MOST_REPAIRS):
            if "got `float`" not in str(error) or not _repaired(plain, str(error)):
                break
            try:
                return msgspec.convert(plain, kind, str_keys=True)
            except msgspec.ValidationError as other:
                error = other
        message, param = _explained(plain, kind, error)
    except RecursionError:
        raise InvalidBody("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as other:  # behind the field that was refused first
        raise InvalidBody(_no_json(body, other)) from other
    raise InvalidBody(message, param) from error


def _repaired(plain: Any, message: str) -> bool:
    """Write the whole floats at the place of an error as integers, in a list all of them."""
    at = _AT.search(message)
    holder, key = _place(plain, at[2]) if at and not at[1] else (None, None)
    if isinstance(holder, list):
        holder[:], before = [_as_integer(item) for item in holder], list(holder)
        return any(type(a) is not type(b) for a, b in zip(holder, before, strict=True))
    if not isinstance(holder, dict) or key not in holder:
        return False
    value = holder[key]
    holder[key] = _as_integer(value)
    return holder[key] is not value


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _place(plain: Any, path: str) -> tuple[Any, Any]:
    """The object or list that holds the value at `path`, and the value's key there; (None, None) where the
    path says no more than "some entry"."""
    holder, key, value = None, None, plain
    for step in _STEP.finditer(path):
        if step[1] is None and step[2] is None:
            return None, None
        holder, key = value, step[1] if step[1] is not None else int(step[2])
        try:
            value = holder[key]
        except (LookupError, TypeError):
            return holder, key
    return holder, key


def _explained(plain: Any, kind: type[Any], error: msgspec.ValidationError) -> tuple[str, str | None]:
    """What to tell the client, and the field at fault."""
    text = str(error)
    at, missing = _AT.search(text), _MISSING.search(text)
    problem = text[: at.start()] if at else text
    path = at[2].removesuffix("[...]") if at else ""
    # The path of a missing field is that of the object which lacks it.
    param = ".".join(part for part in (path, missing and missing[1]) if part) or None
    field = re.split(r"[.\[]", param or "")[0]
    if instead := getattr(kind, "not_supported", {}).get(field):
        return f"{field} is not supported; {instead}", field
    holder, key = _place(plain, path)
    value = _shown(holder, key)
    if param is not None and _PART_TYPE.fullmatch(param) and "Invalid value" in problem:
        use = 'use {"type": "text", "text": "..."}'
        return f"{param} is {value}, but this server takes text only: {use}", param
    if at and (at[1] or at[2].endswith("[...]")):
        entry = _bad_entry(kind, path, holder[key]) if isinstance(holder, dict) else None
        if entry is not None:
            return f"{problem}, in the entry {entry} - at `{param}`", param
    shown = "" if missing or value is None or "Invalid" in problem else f", got {value}"
    if "got `" in problem:
        shown = "" if missing or value is None else f" {value}"
    return f"{problem}{shown}{f' - at `{path}`' if path else ''}", param


def _shown(holder: Any, key: Any) -> str | None:
    """A value as an error shows it: short ones only."""
    try:
        value = holder[key]
    except (LookupError, TypeError):
        return None
    if isinstance(value, list | dict) or value is None:
        return None
    shown = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "…"


def _bad_entry(kind: type[Any], field: str, mapping: Any) -> str | None:
    """The first entry of a mapping, a field of the request, that is wrong by itself."""
    hint = get_type_hints(kind, include_extras=True).get(field)
    if hint is None or not isinstance(mapping, dict):
        return None
    for name, value in islice(mapping.items(), _MOST_ENTRIES):
        try:
            msgspec.convert({name: value}, hint, str_keys=True)
        except msgspec.ValidationError:
            shown = _shown(mapping, name)
            return repr(name[:_LONGEST_SHOWN]) + ("" if shown is None else f": {shown}")
    return None


def _no_json(body: bytes, error: Exception) -> str:
    """What is wrong with a body that is no JSON, or whose text has no UTF-8 form."""
    problem = str(error)
    if not body.strip():
        return "the body is empty; send JSON"
    # The decoder says "truncated" of a string that ends behind half a pair.
    if "surrogate" in problem or "truncated" in problem:
        half = _LONE_SURROGATE.search(body)
        if half is not None:
            escape = (half[1] or half[2]).decode()
            return f"the body holds {escape}, half of a surrogate pair, which is no character by itself"
    return f"the body is not valid JSON: {problem}"
