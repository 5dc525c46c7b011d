"""Server-sent events as bytes: where one ends, and what its data is (WHATWG HTML, section 9.2)."""

from leadline.protocol.openai.common import PromptTokensDetails, Usage
from leadline.protocol.stream_notes import read_note

__all__ = ["DONE", "EventSplitter", "MovableEvents", "data_of", "event"]


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


class MovableEvents:
    """A stream of named events over several pods, by the notes that engines write into it
    (protocol/stream_notes.py).

        pod a   opening ": tokens " │ delta ": tokens 510" │ delta ✗              the client got: opening,
        delta pod b                         resume_token_ids=[510]  opening │ delta ": tokens 2302" │ … │ ":
        end"
                                                              ╰─ dropped

    Events are held until the note with the tokens that they stand for. So the tokens that the client has are
    always known, and the next pod continues exactly behind them. Both pods write the same bytes for the same
    tokens: the gateway gives both the id and the time of the answer, and a seed.
    """

    __slots__ = (
        "_first_resume",
        "_held",
        "_opened",
        "_opening",
        "_sent_ids",
        "_splitter",
        "attempts",
        "done",
        "events",
        "lost",
        "usage_so_far",
    )

    def __init__(self, resume_token_ids: list[int] | None = None) -> None:
        self._first_resume = list(resume_token_ids or ())
        self._sent_ids: list[int] = []
        self._held: list[bytes] = []
        self._opened = False
        """The client has the events that open an answer."""
        self._opening = True
        """The present pod's opening events have not come yet."""
        self._splitter = EventSplitter()
        self.attempts = 1
        self.events = 0
        """Events that the client has."""
        self.done = False
        """The client has the whole answer."""
        self.lost: str | None = None
        """Why the pod's engine is gone, in the pod's words; nothing more comes from it."""
        self.usage_so_far: Usage | None = None
        """Of the whole request, once the pod has said it."""

    @property
    def sent_tokens(self) -> int:
        return len(self._sent_ids)

    @property
    def movable(self) -> bool:
        """Whether another pod can go on."""
        return True

    def closing(self) -> bytes | None:
        """Return what ends the stream without another pod; None where more is missing. The end comes in one
        piece with what is before it, so more is always missing."""
        return None

    def resume(self) -> dict[str, object]:
        """Return the fields of the body for the next pod. The stream expects its answer from now on."""
        self.attempts += 1
        self.lost = None
        self._held = []
        self._opening = True
        self._splitter = EventSplitter()
        tokens = [*self._first_resume, *self._sent_ids]
        return {"resume_token_ids": tokens, "resume_events": self.events}

    def push(self, data: bytes) -> bytes:
        """Return what the client gets now, perhaps nothing. It counts as sent even if the pod is `lost`."""
        out: list[bytes] = []
        for event in self._splitter.push(data):
            note = read_note(event)
            if note is None:
                self._held.append(event)
                continue
            if note.usage is not None:
                prompt, output, cached = note.usage
                details = PromptTokensDetails(cached_tokens=cached)
                self.usage_so_far = Usage(
                    prompt_tokens=prompt,
                    completion_tokens=output,
                    total_tokens=prompt + output,
                    prompt_tokens_details=details,
                )
                continue
            if note.lost is not None:
                self._held = []
                self.lost = note.lost
                break
            if self._opening and self._opened:
                self._held = []
            self._opened, self._opening = True, False
            out += self._held
            self.events += len(self._held)
            self._held = []
            self._sent_ids += note.tokens or ()
            self.done = note.ends
            if self.done:
                break
        return b"".join(out)
