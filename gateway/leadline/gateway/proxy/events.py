"""Server-sent events as bytes: where one ends, and what its data is (WHATWG HTML, section 9.2)."""

__all__ = ["DONE", "EventSplitter", "data_of", "event"]

DONE = b"[DONE]"


class EventSplitter:
    """Cuts a byte stream into whole events, blank line included; keeps what is incomplete."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        events = []
        start = 0
        while True:
            end = data.find(b"\n\n", start)
            crlf = data.find(b"\r\n\r\n", start, end + 3 if end >= 0 else len(data))
            if crlf >= 0 and (end < 0 or crlf < end):
                stop = crlf + 4
            elif end >= 0:
                stop = end + 2
            else:
                break
            events.append(data[start:stop])
            start = stop
        self._rest = data[start:]
        return events

    @property
    def rest(self) -> bytes:
        """Bytes behind the last whole event."""
        return self._rest


def data_of(raw: bytes) -> bytes | None:
    """The data of an event; None if it has none (a comment that keeps the connection alive)."""
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and b"\r" not in raw:
        return raw[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
