"""One stream over several pods: what was sent, and how the answer of the next pod becomes its continuation.

    pod a   role │ The[510] │ capital[2302] │ ✗                     the client got: role The capital
    pod b        │          │   resume_token_ids=[510, 2302]  role │ of[281] │ France │ finish │ [DONE]
                                                              ╰─ dropped; id and created as on pod a

Room: gateway/proxy; pure. Leadline's engines report the token ids of each chunk when the request says
`return_token_ids`, and go on behind `resume_token_ids` drawing the same random numbers, given an explicit
seed. So the gateway adds both to the bodies of streams that it may have to move, and takes the ids out of the
chunks again unless the client asked for them.

Tokens count as sent once text that needs them went out. Tokens of chunks without text (half a character, what
may become a stop string, a tool call, the end of sequence) are forgotten with the pod and generated again:
the engine that goes on must find the end by itself. Where the answer was over but for its last chunks
(finish, usage), the last tokens are generated once more and their text is dropped.
"""

import re
from typing import Any

import msgspec

from leadline.gateway.proxy.body import Incoming
from leadline.gateway.proxy.events import DONE, EventSplitter, data_of, event
from leadline.protocol.openai.common import Usage

__all__ = ["MovableStream"]

_IDS = re.compile(rb',"token_ids":\[[0-9,]*\]')
"""In compact JSON this cannot stand inside a string, where quotes are escaped."""


class _Delta(msgspec.Struct):
    content: str | None = None
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
        "_asked_logprobs",
        "_before",
        "_chat",
        "_created",
        "_echo",
        "_first_resume",
        "_id",
        "_last_text",
        "_offset",
        "_opaque",
        "_pending",
        "_role",
        "_sent_characters",
        "_sent_ids",
        "_skip",
        "_splitter",
        "_tools",
        "_wants_usage",
        "attempts",
        "done",
        "finished",
        "lost",
        "usage",
    )

    def __init__(self, incoming: Incoming) -> None:
        request: Any = incoming.full
        self._chat = incoming.chat
        self._asked_ids = bool(request.return_token_ids)
        self._asked_logprobs = request.logprobs is not None and request.logprobs is not False
        self._echo = bool(getattr(request, "echo", None))
        self._wants_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._first_resume: list[int] = list(request.resume_token_ids or ())
        self._id = ""
        self._created = 0
        self._sent_ids: list[int] = []
        self._pending: list[int] = []
        self._before = 0
        """Of `_sent_ids`: those sent before the last chunk with text."""
        self._last_text = ""
        self._sent_characters = 0
        self._tools = False
        self._offset = 0
        """Characters in front of what the present pod sends, for its text offsets."""
        self._opaque = False
        self._role = False
        """The first chunk has gone out, which every pod begins with."""
        self._skip = 0
        self._splitter = EventSplitter()
        self.attempts = 1
        self.finished = False
        """The finish reason has gone out."""
        self.done = False
        """[DONE] has gone out."""
        self.lost: str | None = None
        """What the pod says of its engine, which is gone; nothing more comes from it."""
        self.usage: Usage | None = None

    @property
    def sent_tokens(self) -> int:
        return len(self._sent_ids) + len(self._pending)

    @property
    def movable(self) -> bool:
        """Another pod can go on. Not once a tool call went out: its parts have ids of their own."""
        return not self._opaque and (not self._tools or self.finished)

    def closing(self) -> bytes | None:
        """What ends the stream without another pod, if nothing else is missing."""
        if self.finished and (not self._wants_usage or self.usage is not None):
            self.done = True
            return event(DONE)
        return None

    def resume(self, max_tokens: int | None) -> dict[str, object]:
        """Fields of the body for the next pod; the stream expects its answer from now on."""
        self.attempts += 1
        self.lost = None
        self._splitter = EventSplitter()
        self._pending = []
        sent, self._skip = self._sent_ids, 0
        if self.finished or (max_tokens is not None and len(sent) + len(self._first_resume) >= max_tokens):
            # The last tokens once more, for the chunks behind them.
            self._skip = len(self._last_text)
            sent = sent[: self._before]
        self._offset = self._sent_characters - self._skip
        fields: dict[str, object] = {"resume_token_ids": [*self._first_resume, *sent]}
        if self._echo:
            fields["echo"] = False
        return fields

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
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return self._renamed(data, chunk) if self.attempts > 1 else raw
        return self._choice(raw, data, chunk, chunk.choices[0])

    def _choice(self, raw: bytes, data: bytes, chunk: _Chunk, choice: _Choice) -> bytes:
        ids = choice.token_ids or []
        text = (choice.delta.content or "") if choice.delta is not None else choice.text
        tools = choice.delta is not None and bool(choice.delta.tool_calls)
        role = self._chat and b'"role":"assistant"' in data and not text and not ids
        if self.finished or (role and self._role):
            return b""
        self._role = self._role or role
        if self._skip:  # said before: neither text nor ids are news
            skipped = min(self._skip, len(text))
            self._skip -= skipped
            if skipped == len(text) and choice.finish_reason is None:
                return b""
            return self._rewritten(data, chunk, text[skipped:])
        visible = (
            bool(text)
            or tools
            or role
            or choice.finish_reason is not None
            or (self._asked_ids and bool(ids))
            or (self._asked_logprobs and choice.logprobs is not None)
        )
        if not visible:
            opening = not self._chat and not self._role  # a text completion's first chunk may be empty
            self._role = True
            self._pending += ids
            if not opening:
                return b""
        elif ids or self._pending:
            self._before = len(self._sent_ids)
            self._sent_ids += self._pending + ids
            self._pending = []
            self._last_text = text
        self._tools = self._tools or tools
        if choice.finish_reason is not None:
            self.finished = True
        if self.attempts > 1:
            out = self._rewritten(data, chunk, text)
            self._sent_characters += len(text)
            return out
        self._sent_characters += len(text)
        return raw if self._asked_ids or not choice.token_ids else _IDS.sub(b"", raw, count=1)

    def _rewritten(self, data: bytes, chunk: _Chunk, text: str) -> bytes:
        """A chunk of a later pod, as if the first had gone on."""
        plain = msgspec.json.decode(data)
        plain["id"], plain["created"] = self._id, self._created
        choice = plain["choices"][0]
        if "delta" in choice:
            if choice["delta"].get("content") is not None:
                choice["delta"]["content"] = text
        else:
            choice["text"] = text
        if not self._asked_ids:
            choice.pop("token_ids", None)
        logprobs = choice.get("logprobs")
        if logprobs and logprobs.get("text_offset"):
            logprobs["text_offset"] = [at + self._offset for at in logprobs["text_offset"]]
        if choice.get("finish_reason") is not None:
            self.finished = True
        return event(_encode(plain))

    def _renamed(self, data: bytes, chunk: _Chunk) -> bytes:
        """The chunk with the usage."""
        plain = msgspec.json.decode(data)
        plain["id"], plain["created"] = self._id, self._created
        usage = plain.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details")
            if details:  # the resumed output may have been cached as well
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return event(_encode(plain))
