"""Decoding of request bodies: JSON to a request type, or one typed error that names the field."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

__all__ = ["InvalidBody", "decode_body", "encode_body"]

T = TypeVar("T")

# "… - at `$.messages[0].content`", and for the key of a mapping "… - at `key` in `$.logit_bias`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")


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
        message, param = str(error), _param(str(error))
        field = re.split(r"[.\[]", param or "")[0]
        if instead := getattr(kind, "not_supported", {}).get(field):
            message, param = f"{field} is not supported; {instead}", field
        raise InvalidBody(message, param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidBody("the body is nested too deeply") from error


_encoder = msgspec.json.Encoder()


def encode_body(message: msgspec.Struct) -> bytes:
    """`message` as JSON text."""
    return _encoder.encode(message)


@lru_cache(maxsize=64)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _param(message: str) -> str | None:
    path = _PATH.search(message)
    missing = _MISSING.search(message)
    # The path of a missing field is that of the object which lacks it.
    parts = [found[1] for found in (path, missing) if found and found[1]]
    return ".".join(parts) or None
