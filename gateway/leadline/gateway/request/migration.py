"""One stream over several pods: what was sent, and how the answer of the next pod becomes its continuation.

    pod a   role │ The[510] │ capital[2302] │ ✗                     the client got: role The capital
    pod b        │          │   resume_token_ids=[510, 2302]  role │ of[281] │ France │ finish │ [DONE]
                                                              ╰─ dropped; id and created as on pod a

Pure. Leadline's engines report the token ids of each chunk when the request says
`return_token_ids`, and go on behind `resume_token_ids` drawing the same random numbers, given an explicit
seed. So the gateway adds both to the bodies of streams that it may have to move, and takes the ids out of the
chunks again unless the client asked for them.

A chunk brings all that came of the tokens that it names. The next pod digests the tokens that were sent as if
it had sampled them: text held back (half a character, what may become a stop string, a tool call) is held
back there too, the echo of the prompt and the offsets of log probabilities begin where they must, and where
the tokens satisfy a stop it answers with the end alone.
"""

import re
from typing import Any

import msgspec

from leadline.gateway.request.body import Incoming
from leadline.gateway.request.events import DONE, EventSplitter, data_of, event
from leadline.protocol.openai.common import Usage

__all__ = ["MovableStream"]

_IDS = re.compile(rb',"token_ids":\[[0-9,]*\]')
"""In compact JSON this cannot stand inside a string, where quotes are escaped."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Error(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _Chunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Chunk)
_encode = msgspec.json.Encoder().encode


class MovableStream:
    """The client's view of one streamed answer. `push` takes a pod's bytes and gives the client's."""

    __slots__ = (
        "_asked_ids",
        "_chat",
        "_created",
        "_first_resume",
        "_id",
        "_opaque",
        "_opened",
        "_sent_ids",
        "_splitter",
        "_wants_usage",
        "attempts",
        "done",
        "finished",
        "lost",
        "usage",
        "usage_so_far",
    )

    events = 0
    """Chunks have no numbers."""

    def __init__(self, incoming: Incoming) -> None:
        request: Any = incoming.full
        self._chat = incoming.chat
        self._asked_ids = bool(request.return_token_ids)
        self._wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._first_resume: list[int] = list(request.resume_token_ids or ())
        self._id = ""
        self._created = 0
        self._sent_ids: list[int] = []
        self._opaque = False
        """Something went out of which it is not known what tokens it stands for."""
        self._opened = False
        """The first chunk has gone out, which every pod begins with: a chat's role, a text that may be
        empty."""
        self._splitter = EventSplitter()
        self.attempts = 1
        self.finished = False
        """The finish reason has gone out."""
        self.done = False
        """[DONE] has gone out."""
        self.lost: str | None = None
        """The pod's message that its engine is gone; nothing more comes from it."""
        self.usage: Usage | None = None
        """Of the last chunk."""
        self.usage_so_far: Usage | None = None
        """Of any chunk, where the client asked for it in each."""

    @property
    def sent_tokens(self) -> int:
        return len(self._sent_ids)

    @property
    def movable(self) -> bool:
        """Another pod can go on."""
        return not self._opaque

    @property
    def resumption(self) -> dict[str, object]:
        """Fields of the body for the next pod, should this one be lost now."""
        return {"resume_token_ids": [*self._first_resume, *self._sent_ids]}

    def closing(self) -> bytes | None:
        """What ends the stream without another pod, if nothing else is missing."""
        if self.finished and (not self._wants_usage or self.usage is not None):
            self.done = True
            return event(DONE)
        return None

    def resume(self) -> dict[str, object]:
        """Fields of the body for the next pod; the stream expects its answer from now on."""
        self.attempts += 1
        self.lost = None
        self._splitter = EventSplitter()
        return self.resumption

    def push(self, data: bytes) -> bytes:
        """What it gives may be empty, and must go out: it counts as sent even if the pod is `lost` now."""
        out = []
        for raw in self._splitter.push(data):
            out.append(self._event(raw))
            if self.lost is not None:
                break
        return b"".join(out)

    def _event(self, raw: bytes) -> bytes:
        data = data_of(raw)
        if data is None:
            return raw
        if data == DONE:
            self.done = True
            return raw
        try:
            chunk = _decoder.decode(data)
        except msgspec.DecodeError:
            self._opaque = True
            return raw
        if chunk.error is not None:
            if chunk.error.code == "engine_dead":
                self.lost = chunk.error.message
                return b""
            self.finished = self.done = True
            return raw
        if not self._id:
            self._id, self._created = chunk.id, chunk.created
        self.usage_so_far = chunk.usage or self.usage_so_far
        if not chunk.choices:
            self.usage = chunk.usage
            return self._rewritten(data) if self.attempts > 1 else raw
        return self._choice(raw, data, chunk.choices[0])

    def _choice(self, raw: bytes, data: bytes, choice: _Choice) -> bytes:
        ids, delta = choice.token_ids, choice.delta
        text = bool(choice.text if delta is None else delta.content or delta.reasoning or delta.tool_calls)
        says = text or choice.logprobs is not None
        ends = choice.finish_reason is not None
        opens = self._opens(delta, says=says, more=bool(ends or ids))
        if self.finished or (opens and self._opened):
            return b""
        self._opened = self._opened or opens
        out = b""
        if says or ends or opens or (self._asked_ids and ids):
            if self.attempts > 1:
                out = self._rewritten(data)
            else:
                out = raw if self._asked_ids or ids is None else _IDS.sub(b"", raw, count=1)
        if ids:
            self._sent_ids += ids
        elif says and not (ends or opens):
            self._opaque = True
        self.finished = ends
        return out

    def _opens(self, delta: _Delta | None, *, says: bool, more: bool) -> bool:
        """Whether a chunk opens the answer. Of a chat it has the role, and repeats a message (`echo`) or
        says nothing; of a text it may have tokens. `more`: it ends the answer, or names tokens."""
        if not self._chat:
            return not self._opened
        if not (says or more):
            return True
        # Other engines' later chunks may name the role and have text.
        return (
            delta is not None
            and delta.role is not None
            and not more
            and (not self._opened or self.attempts > 1)
        )

    def _rewritten(self, data: bytes) -> bytes:
        """A chunk of a later pod, as if the first had gone on."""
        plain = msgspec.json.decode(data)
        plain["id"], plain["created"] = self._id, self._created
        if not self._asked_ids:
            for choice in plain["choices"]:
                choice.pop("token_ids", None)
        return event(_encode(plain))
