"""Ids of Redis stream entries, `<milliseconds>-<number>`, as positions in the stream."""

__all__ = ["START", "order", "text_of"]

START = "0-0"
"""In front of every entry."""


def text_of(stream_id: bytes | str) -> str:
    return stream_id.decode() if isinstance(stream_id, bytes) else stream_id


def order(stream_id: str) -> tuple[int, int]:
    """Compares as the entries lie in the stream; the first number is Redis's clock, in milliseconds. Raises
    ValueError for what is no id."""
    milliseconds, _, number = stream_id.partition("-")
    return int(milliseconds), int(number or 0)
