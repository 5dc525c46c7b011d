"""The generation APIs that the gateway proxies: how each is read, moved to another pod, and ended.

A new API is a row in DIALECTS.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from leadline.gateway.request.body import Incoming, read_incoming, read_pooling
from leadline.gateway.request.events import DONE, MovableEvents, event
from leadline.gateway.request.local_answers import counted, detokenized, tokenized
from leadline.gateway.request.migration import MovableStream
from leadline.gateway.request.prompt import RoutedPrompt
from leadline.gateway.services import Service
from leadline.protocol.anthropic.answers import MessageUsage
from leadline.protocol.anthropic.errors import ErrorEvent
from leadline.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from leadline.protocol.errors import RequestError, encode_error
from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest, encode_body
from leadline.protocol.openai.common import PromptTokensDetails, Usage
from leadline.protocol.openai.service import DetokenizeRequest, TokenizeRequest
from leadline.protocol.responses import ResponsesRequest, in_words_of_responses
from leadline.protocol.responses.objects import ResponseErrorEvent

__all__ = ["DIALECTS", "Dialect", "Movable", "answer_identity"]

_USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


LocalAnswer = Callable[[Service, Incoming, RoutedPrompt], Awaitable[bytes | None]]


class Movable(Protocol):
    """One streamed answer, written by one pod after the other."""

    @property
    def sent_tokens(self) -> int:
        """Output tokens that the client has."""

    @property
    def movable(self) -> bool:
        """Whether another pod can go on."""

    @property
    def done(self) -> bool:
        """Whether the client has the whole answer."""

    @property
    def lost(self) -> str | None:
        """Why the pod's engine is gone, in the pod's words."""

    @property
    def events(self) -> int:
        """Events that the client has, where they are numbered."""

    @property
    def usage_so_far(self) -> Usage | None: ...

    def push(self, data: bytes) -> bytes:
        """Take bytes of the pod; return those for the client."""

    def resume(self) -> dict[str, object]:
        """Return the fields of the body for the next pod, whose answer is expected from now on."""

    def closing(self) -> bytes | None:
        """Return what ends the stream without another pod; None where more is missing."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API.

    Attributes:
        operation: name of the operation in traces (OpenTelemetry's gen_ai conventions).
        read: a body to a request. Raises RequestError 400.
        moving: a request to the stream that can move.
        is_whole: whether a stream that ends with these bytes is complete.
        usage_of: the usage in a whole answer, None where there is none.
        usage_in: the usage in the last bytes of a stream.
        failing: (message, type, code) of an error, and the number of events that the client has, to the event
            that ends a stream that cannot go on.
        identity: makes the fields that give an answer the same id and time on every pod.
        local: returns the gateway's own answer to a request, or None if a pod must answer it. Such requests
            take no tokens.
        stored: for APIs that store answers: the last bytes of a stream to the answer, None where it did not
            come to its end.
        worded: a refusal to one that names the fields of the API.
    """

    operation: str
    read: Callable[[bytes], Incoming]
    moving: Callable[[Incoming], Movable]
    is_whole: Callable[[bytes], bool]
    usage_of: Callable[[bytes], Usage | None]
    usage_in: Callable[[bytes], Usage | None]
    failing: Callable[[str, str, str, int], bytes]
    identity: Callable[[], dict[str, object]] = dict
    local: LocalAnswer | None = None
    stored: Callable[[bytes], bytes | None] | None = None
    worded: Callable[[RequestError], RequestError] = lambda error: error


def answer_identity(prefix: str) -> dict[str, object]:
    """Return `answer_id`, which begins with `prefix`, and `answer_created` (seconds since the Unix
    epoch)."""
    return {"answer_id": prefix + secrets.token_hex(16), "answer_created": int(time.time())}


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_answers = msgspec.json.Decoder(_Answer)
_usages = msgspec.json.Decoder(Usage)


def _usage_of(body: bytes) -> Usage | None:
    try:
        return _answers.decode(body).usage
    except msgspec.DecodeError:
        return None


def _usage_in(tail: bytes) -> Usage | None:
    found = _USAGE.findall(tail)
    try:
        return _usages.decode(found[-1]) if found else None
    except msgspec.DecodeError:
        return None


def _failing(message: str, type: str, code: str, events: int) -> bytes:
    return event(encode_error(message, type=type, code=code))


def _without_output(operation: str, kind: type[Any], local: LocalAnswer) -> Dialect:
    """The dialect of an endpoint that generates nothing and streams nothing."""
    return replace(
        _chunks(operation, CompletionRequest),
        read=partial(read_incoming, kind=kind),
        usage_of=_no_usage,
        local=local,
    )


def _chunks(operation: str, kind: type[ChatCompletionRequest] | type[CompletionRequest]) -> Dialect:
    """The dialect of an endpoint that streams chunks and ends them with [DONE]."""
    return Dialect(
        operation=operation,
        read=partial(read_incoming, kind=kind),
        moving=MovableStream,
        is_whole=lambda tail: tail.endswith(event(DONE)),
        usage_of=_usage_of,
        usage_in=_usage_in,
        failing=_failing,
    )


class _Message(msgspec.Struct):
    usage: MessageUsage | None = None


_messages = msgspec.json.Decoder(_Message)
_message_usages = msgspec.json.Decoder(MessageUsage)
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def _message_usage_of(body: bytes) -> Usage | None:
    try:
        usage = _messages.decode(body).usage
    except msgspec.DecodeError:
        return None
    return None if usage is None else usage.of_chat()


def _message_usage_in(tail: bytes) -> Usage | None:
    """Only where the last events say all of it, as not all servers' do."""
    found = _USAGE.findall(tail)
    try:
        return _message_usages.decode(found[-1]).of_chat() if found else None
    except msgspec.DecodeError:
        return None


def _message_failing(message: str, type: str, code: str, events: int) -> bytes:
    return b"event: error\n" + event(encode_body(ErrorEvent.of(502, message, code)))


def _no_usage(data: bytes) -> Usage:
    """Counting takes no tokens."""
    return Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)


_MESSAGES = Dialect(
    operation="chat",
    read=partial(read_incoming, kind=MessagesRequest),
    moving=lambda incoming: MovableEvents(getattr(incoming.full, "resume_token_ids", None)),
    is_whole=lambda tail: tail.endswith(_STOP),
    usage_of=_message_usage_of,
    usage_in=_message_usage_in,
    failing=_message_failing,
    identity=partial(answer_identity, "msg_"),
)


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    input_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.input_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.input_tokens + self.output_tokens,
            prompt_tokens_details=self.input_tokens_details,
        )


class _ResponsesAnswer(msgspec.Struct):
    usage: _ResponsesUsage | None = None


_responses = msgspec.json.Decoder(_ResponsesAnswer)
_responses_usages = msgspec.json.Decoder(_ResponsesUsage)
_LAST_RESPONSE = re.compile(
    rb'"usage":\s*\{\s*"input_tokens":\s*\d|^event: (?:error|response\.failed)\n', re.MULTILINE
)
"""Only the last event of a stream has a usage. In JSON this cannot stand inside a string. A number, because a
tool that the first events repeat may have a field of this name."""


def _responses_usage_of(body: bytes) -> Usage | None:
    try:
        found = _responses.decode(body).usage
    except msgspec.DecodeError:
        return None
    return None if found is None else found.usage()


def _responses_usage_in(tail: bytes) -> Usage | None:
    found = _USAGE.findall(tail)
    try:
        return _responses_usages.decode(found[-1]).usage() if found else None
    except msgspec.DecodeError:
        return None


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


_last_events = msgspec.json.Decoder(_LastEvent)
_ENDS = re.compile(rb"^event: response\.(?:completed|incomplete)\r?\ndata: (.*)$", re.MULTILINE)


def _response_in(tail: bytes) -> bytes | None:
    found = _ENDS.search(tail)
    try:
        return bytes(_last_events.decode(found[1]).response) if found else None
    except msgspec.DecodeError:
        return None


def _responses_failing(message: str, type: str, code: str, events: int) -> bytes:
    failed = ResponseErrorEvent(code=code, message=message, sequence_number=events)
    return b"event: error\n" + event(encode_body(failed))


RESPONSES = Dialect(
    operation="chat",
    read=partial(read_incoming, kind=ResponsesRequest),
    moving=lambda incoming: MovableEvents(getattr(incoming.full, "resume_token_ids", None)),
    is_whole=lambda tail: tail.endswith(b"\n\n") and _LAST_RESPONSE.search(tail) is not None,
    usage_of=_responses_usage_of,
    usage_in=_responses_usage_in,
    failing=_responses_failing,
    identity=partial(answer_identity, "resp_"),
    stored=_response_in,
    worded=in_words_of_responses,
)


class _PoolingUsage(msgspec.Struct):
    total_tokens: int


_pooling_usages = msgspec.json.Decoder(_PoolingUsage)
_USAGE_BYTES = 512


def _pooling_usage_of(body: bytes) -> Usage | None:
    """The usage at either end of an answer: between them, vectors may be megabytes."""
    found = _USAGE.findall(body[-_USAGE_BYTES:]) or _USAGE.findall(body[:_USAGE_BYTES])
    try:
        tokens = _pooling_usages.decode(found[-1]).total_tokens if found else None
    except msgspec.DecodeError:
        return None
    return None if tokens is None else Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)


def _pooling(operation: str) -> Dialect:
    """The dialect of an endpoint that turns texts into numbers: nothing of it streams."""
    return replace(_chunks(operation, CompletionRequest), read=read_pooling, usage_of=_pooling_usage_of)


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": _chunks("chat", ChatCompletionRequest),
    "/v1/completions": _chunks("text_completion", CompletionRequest),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": replace(
        _MESSAGES,
        operation="count_tokens",
        read=partial(read_incoming, kind=CountTokensRequest),
        usage_of=_no_usage,
        local=counted,
    ),
    "/v1/responses": RESPONSES,
    "/v1/embeddings": _pooling("embeddings"),
    "/v1/rerank": _pooling("rerank"),
    "/v2/rerank": _pooling("rerank"),
    "/v1/score": _pooling("score"),
    "/tokenize": _without_output("tokenize", TokenizeRequest, tokenized),
    "/detokenize": _without_output("detokenize", DetokenizeRequest, detokenized),
}
"""Path → its API."""
