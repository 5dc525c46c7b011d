"""Decoding of msgpack that another of our processes wrote, with a size cap and one typed error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

__all__ = ["WireError", "decode_msgpack"]

T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are not the message they should be: too long, no msgpack, or of another shape."""


def decode_msgpack(decoder: msgspec.msgpack.Decoder[T], data: bytes, limit: int) -> T:
    """The message in `data`. Raises WireError when it is longer than `limit` bytes or does not decode."""
    if len(data) > limit:
        raise WireError(f"message of {len(data)} bytes exceeds the limit of {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a valid message: {error}") from error
