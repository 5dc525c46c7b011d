"""From a pod's answer to the client: whole answers, streams, and streams that move to another pod.

Room: gateway/proxy. Nothing is held back: each piece goes out as it comes (P25). The status line goes out
with the first piece; from then on the pod can only be replaced by one that continues (migration.py).
"""

import asyncio
import logging
import re
import time

import msgspec

from leadline.gateway.errors import DeadlinePassed, NoPods
from leadline.gateway.explain import explanation
from leadline.gateway.proxy.attempts import Attempt, BadGateway, Dispatcher, GatewayTimeout
from leadline.gateway.proxy.call import Call
from leadline.gateway.proxy.events import event
from leadline.gateway.proxy.headers import header, response_headers
from leadline.gateway.proxy.migration import MovableStream, PodFailed
from leadline.gateway.proxy.upstream import UpstreamError, UpstreamLost
from leadline.protocol.errors import encode_error
from leadline.protocol.openai.common import Usage

__all__ = ["Client", "relay"]

logger = logging.getLogger("leadline.gateway")

_TAIL = 4096
_USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_answers = msgspec.json.Decoder(_Answer)
_usages = msgspec.json.Decoder(Usage)


class Client:
    """The client's side of an exchange: ASGI's `send`, and what was sent."""

    __slots__ = ("_send", "finished", "started")

    def __init__(self, send: object) -> None:
        self._send = send
        self.started = False
        self.finished = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})  # type: ignore[operator]

    async def write(self, body: bytes, *, more: bool) -> None:
        if not more:
            self.finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})  # type: ignore[operator]


async def relay(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Client) -> None:
    """Pass the answer on and close the attempt."""
    try:
        if attempt.stream and dispatcher.movable(call, attempt.pod):
            attempt = await _movable(dispatcher, call, attempt, client)
        elif attempt.stream:
            await _stream(dispatcher, call, attempt, client)
        else:
            await _whole(dispatcher, call, attempt, client)
    finally:
        attempt.close()


async def _whole(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Client) -> None:
    """An answer that is no stream. Refusals of other attempts have no connection any more."""
    status, headers = attempt.status, attempt.headers
    call.status = status
    connection = attempt.connection
    whole = connection is None or connection.complete
    plain = header(headers, b"content-encoding") is None
    if whole:
        length = (b"content-length", b"%d" % len(attempt.body))
        out = response_headers(headers, keep_length=False)
        if status not in (204, 304):
            out.append(length)
        if status == 200 and plain:
            call.usage = _usage_of(attempt.body)
        attempt.close()  # the pod is free before the client has read
        await client.start(status, _decorated(call, out))
        await client.write(attempt.body, more=False)
        return
    await client.start(status, _decorated(call, response_headers(headers, keep_length=True)))
    await client.write(attempt.body, more=True)
    assert connection is not None
    while data := await dispatcher.patiently(connection.read, attempt.pod, dispatcher.settings.idle_timeout):
        await client.write(data, more=True)
    await client.write(b"", more=False)


async def _stream(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Client) -> None:
    """A stream that stays where it is: bytes as they come."""
    connection = attempt.connection
    assert connection is not None
    await _start_stream(call, attempt, client)
    data, tail = attempt.body, b""
    try:
        while data:
            call.piece()
            await client.write(data, more=True)
            tail = (tail + data)[-_TAIL:]
            data = await dispatcher.patiently(connection.read, attempt.pod, dispatcher.settings.idle_timeout)
    except UpstreamError as error:
        attempt.failed()
        await _break_off(call, client, f"the pod was lost in mid-stream: {error}")
        return
    found = _USAGE.findall(tail)
    if found:
        try:
            call.usage = _usages.decode(found[-1])
        except msgspec.DecodeError:
            call.usage = None
    attempt.close()
    await client.write(b"", more=False)


async def _movable(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Client) -> Attempt:
    """A stream that goes on elsewhere when its pod dies. Returns the last attempt."""
    stream = MovableStream(call.incoming)
    data = attempt.body
    while True:
        try:
            while True:
                out = stream.push(data)
                if out:
                    if not client.started:
                        await _start_stream(call, attempt, client)
                    call.piece()
                    await client.write(out, more=True)
                connection = attempt.connection
                assert connection is not None
                data = await dispatcher.patiently(
                    connection.read, attempt.pod, dispatcher.settings.idle_timeout
                )
                if not data:
                    if stream.done:
                        break
                    raise UpstreamLost("the stream ended before its [DONE]")
            call.usage = stream.usage
            attempt.close()
            await client.write(b"", more=False)
            return attempt
        except (UpstreamError, PodFailed) as error:
            attempt.failed()
            attempt.close()
            problem = error
        if stream.done:
            await client.write(b"", more=False)
            return attempt
        logger.warning(
            "pod %s was lost after %d tokens of a stream: %s", attempt.pod.id, stream.sent_tokens, problem
        )
        ending = stream.closing()
        if ending is not None:
            call.metrics.migrated("finished")
            await client.write(ending, more=False)
            return attempt
        moved = await _move(dispatcher, call, attempt, stream)
        if moved is None:
            call.metrics.migrated("failed")
            await _break_off(call, client, f"the pod was lost in mid-stream: {problem}")
            return attempt
        call.metrics.migrated("moved")
        attempt, data = moved, moved.body


async def _move(dispatcher: Dispatcher, call: Call, lost: Attempt, stream: MovableStream) -> Attempt | None:
    """The attempt that goes on, or None."""
    settings = dispatcher.settings
    if call.migrations >= settings.max_migrations or not stream.movable:
        return None
    call.migrations += 1
    fields = stream.resume(call.incoming.max_tokens)
    ends = time.monotonic() + settings.migration_wait
    if call.deadline is not None:
        ends = min(ends, call.deadline)
    avoid = {lost.pod.id}
    while True:
        try:
            attempt = await dispatcher.answer(call, extra=fields, avoid=avoid)
        except (NoPods, BadGateway, GatewayTimeout) as error:
            if time.monotonic() >= ends:
                logger.warning("a stream found no other pod: %s", error)
                return None
            await asyncio.sleep(0.1)
            avoid = set()  # the lost pod may be back
            continue
        except DeadlinePassed:
            return None
        if attempt.stream:
            return attempt
        logger.warning(
            "pod %s does not go on with a stream: status %d %s",
            attempt.pod.id,
            attempt.status,
            attempt.body[:200],
        )
        attempt.close()
        if attempt.status not in (429, 503) or time.monotonic() >= ends:
            return None
        await asyncio.sleep(0.1)


async def _start_stream(call: Call, attempt: Attempt, client: Client) -> None:
    call.status = attempt.status
    headers = [
        pair
        for pair in response_headers(attempt.headers, keep_length=False)
        if pair[0] != b"x-accel-buffering"
    ]
    headers.append((b"x-accel-buffering", b"no"))
    if header(headers, b"cache-control") is None:
        headers.append((b"cache-control", b"no-cache"))
    await client.start(attempt.status, _decorated(call, headers))


async def _break_off(call: Call, client: Client, message: str) -> None:
    """End a stream that cannot be saved in a way that clients notice: an error event and no [DONE]."""
    logger.error("%s (%s)", message, call.service.name)
    call.status = 502
    error = encode_error("the pod was lost in mid-stream", type="server_error", code="upstream_lost")
    if not client.started:
        await client.start(502, [(b"content-type", b"application/json")])
        await client.write(error, more=False)
        return
    await client.write(event(error), more=False)


def _decorated(call: Call, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    decision = call.decision
    if decision is not None:
        headers.append((b"x-leadline-pod", decision.pod.id.encode("latin-1", "replace")))
        if call.explain:
            value = explanation(
                decision, prompt_tokens=call.prompt.tokens, exact=call.prompt.exact, attempt=call.attempts
            )
            headers.append((b"x-leadline-explain", value))
    headers += call.extra_headers
    return headers


def _usage_of(body: bytes) -> Usage | None:
    try:
        return _answers.decode(body).usage
    except msgspec.DecodeError:
        return None
