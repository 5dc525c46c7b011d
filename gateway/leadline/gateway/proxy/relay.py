"""From a pod's answer to the client: whole answers, streams, and streams that move to another pod.

Nothing is held back: each piece goes out as it comes (P25). The status line goes out
with the first piece; from then on the pod can only be replaced by one that continues (migration.py).
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable

from leadline.gateway.errors import DeadlinePassed, NoPods
from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, PodScore
from leadline.gateway.proxy.dispatcher import ELSEWHERE, Attempt, BadGateway, Dispatcher, GatewayTimeout
from leadline.gateway.proxy.forwarding import header, response_headers
from leadline.gateway.request.context import Call
from leadline.gateway.request.dialects import Movable
from leadline.gateway.request.events import EventSplitter
from leadline.gateway.upstream.connection import Connection, UpstreamError, UpstreamLost
from leadline.protocol.http.answers import answer_to
from leadline.protocol.http.exchange import Exchange
from leadline.protocol.http.headers import NAME

__all__ = ["MAX_PODS", "explanation", "relay"]


MAX_PODS = 16


def explanation(decision: Decision, *, prompt_tokens: int, exact: bool, attempt: int) -> bytes:
    """Return the value of `X-Leadline-Explain`: why a pod was picked, as one line of JSON.

    {"pod": "a", "policy": "prefix", "reason": "soonest of 2", "prompt_tokens": 900, "exact": true, "attempt":
    1,
     "pods": [{"pod": "a", "matched_tokens": 832, "requests": 0, "seconds": 0.02, "queue": 0.0, ...}, ...]}

    At most `MAX_PODS` pods, in the order of their expected seconds. ASCII only, because it is a header.
    """
    scores = sorted(
        decision.scores or (decision.picked,),
        key=lambda score: (score.seconds is None, score.seconds or 0.0, -score.matched_tokens),
    )
    return json.dumps(
        {
            "pod": decision.pod.id,
            "policy": decision.policy,
            "reason": decision.reason,
            "prompt_tokens": prompt_tokens,
            "exact": exact,
            "attempt": attempt,
            "pods": [_row(score) for score in scores[:MAX_PODS]],
        },
        separators=(",", ":"),
    ).encode("ascii")


def _row(score: PodScore) -> dict[str, object]:
    row: dict[str, object] = {
        "pod": score.pod,
        "matched_tokens": score.matched_tokens,
        "requests": score.requests,
    }
    if score.seconds is not None:
        row |= {
            "seconds": round(score.seconds, 6),
            "queue": round(score.queue_seconds, 6),
            "prefill": round(score.prefill_seconds, 6),
            "block_wait": round(score.block_wait_seconds, 6),
            "decode": round(score.decode_seconds, 6),
        }
    return row


logger = logging.getLogger("leadline.gateway")

_TAIL = 4096
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 0.5
"""Seconds between two looks for a pod that goes on with a stream: all streams of a lost pod look at once, and
the other pods may be full."""


async def relay(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Exchange) -> None:
    """Pass the answer on and close the attempt."""
    try:
        if call.keep is not None and not attempt.stream and attempt.status == 200:
            await call.keep(attempt.body)
        if not attempt.stream and (attempt.connection is None or attempt.connection.complete):
            _at_once(call, attempt, client)
        elif attempt.stream and attempt.movable:
            await _movable(dispatcher, call, attempt, client)
        elif attempt.stream:
            await _stream(dispatcher, call, attempt, client)
        else:
            await _whole(dispatcher, call, attempt, client)
    finally:
        attempt.close()


def _at_once(call: Call, attempt: Attempt, client: Exchange) -> None:
    """An answer that is here already. Refusals of other attempts have no connection any more."""
    status, headers, body = attempt.status, attempt.headers, attempt.body
    attempt.close()
    call.status = status
    if status == 200 and header(headers, b"content-encoding") is None:
        call.usage = call.dialect.usage_of(body)
    client.answer(status, _decorated(call, response_headers(headers, keep_length=False)), body)


async def _whole(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Exchange) -> None:
    """An answer that is no stream, and so long that it is passed on as it comes."""
    call.status = attempt.status
    connection = attempt.connection
    assert connection is not None
    client.start(attempt.status, _decorated(call, response_headers(attempt.headers, keep_length=True)))
    await client.write(attempt.body, more=True)
    try:
        while data := await _next_piece(dispatcher, connection, attempt.pod):
            await client.write(data, more=True)
    except UpstreamError as error:
        attempt.failed()
        call.status = 502
        logger.error("the pod was lost in mid-answer: %s (%s)", error, call.service.name)
        client.drop()
        return
    await client.write(b"", more=False)


async def _stream(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Exchange) -> None:
    """A stream that stays where it is: bytes as they come, but whole events, so that the error event of a pod
    that dies within one can be read."""
    connection = attempt.connection
    assert connection is not None
    _start_stream(call, attempt, client)
    data, tail, splitter, dialect = attempt.body, b"", EventSplitter(), call.dialect
    plain = header(attempt.headers, b"content-encoding") is None
    try:
        while data:
            if plain:
                events = splitter.push(data)
                call.output += len(events)
                call.events += len(events)
                data = b"".join(events)
                if call.keep is not None:
                    await _keep(call, data)
            if data:
                call.piece()
                await client.write(data, more=True)
                tail = (tail + data)[-_TAIL:]
            data = await _next_piece(dispatcher, connection, attempt.pod)
    except UpstreamError as error:
        if not dialect.is_whole(tail):
            attempt.failed()
            await _break_off(call, client, f"the pod was lost in mid-stream: {error}")
            return
    except asyncio.CancelledError:
        if dialect.is_whole(tail):
            call.delivered, call.usage = True, dialect.usage_in(tail)
        raise
    call.usage = dialect.usage_in(tail)
    attempt.close()
    await client.write(splitter.rest, more=False)


async def _movable(dispatcher: Dispatcher, call: Call, attempt: Attempt, client: Exchange) -> None:
    """A stream that goes on elsewhere when its pod dies. Closes each attempt."""
    stream = call.dialect.moving(call.incoming)
    while True:
        try:
            problem = await _pump(dispatcher, call, attempt, stream, client)
            if problem is not None:
                attempt.failed()
        finally:
            attempt.close()
        if problem is None:
            await client.write(b"", more=False)
            return
        logger.warning(
            "pod %s was lost after %d tokens of a stream: %s", attempt.pod.id, stream.sent_tokens, problem
        )
        ending = stream.closing()
        if ending is not None:
            call.metrics.migrated("finished")
            await client.write(ending, more=False)
            return
        moved = await _move(dispatcher, call, attempt, stream)
        if moved is None:
            call.metrics.migrated("failed")
            await _break_off(call, client, f"the pod was lost in mid-stream: {problem}")
            return
        call.metrics.migrated("moved")
        attempt = moved


async def _pump(
    dispatcher: Dispatcher, call: Call, attempt: Attempt, stream: Movable, client: Exchange
) -> UpstreamError | None:
    """Send on what the pod says. None: the stream has come to its end; else how the pod was lost before."""
    connection, data, pod = attempt.connection, attempt.body, attempt.pod
    assert connection is not None

    def elsewhere() -> bool:
        if call.migrations >= dispatcher.settings.max_migrations or not stream.movable:
            return False
        others = dispatcher.admission.with_capacity(call.service, time.monotonic())
        return any(other is not pod for other in others)

    problem: UpstreamError = UpstreamLost("the stream ended too early")
    try:
        while data:
            out = stream.push(data)
            call.output, call.usage = stream.sent_tokens, stream.usage_so_far
            call.events = stream.events
            if out:
                if stream.done:
                    await _keep(call, out)
                if not client.started:
                    _start_stream(call, attempt, client)
                call.piece()
                await client.write(out, more=True)
            if stream.lost is not None:
                problem = UpstreamLost(stream.lost)
                break
            data = await _next_piece(dispatcher, connection, pod, elsewhere)
    except UpstreamError as error:
        problem = error
    except asyncio.CancelledError:
        call.delivered = stream.done
        raise
    return None if stream.done else problem


async def _move(dispatcher: Dispatcher, call: Call, lost: Attempt, stream: Movable) -> Attempt | None:
    """The attempt that goes on, or None."""
    settings = dispatcher.settings
    if call.migrations >= settings.max_migrations or not stream.movable:
        return None
    call.migrations += 1
    fields = stream.resume()
    ends = time.monotonic() + settings.migration_wait
    if call.deadline is not None:
        ends = min(ends, call.deadline)
    avoid, pause = {lost.pod.id}, _FIRST_PAUSE
    while True:
        try:
            attempt = await dispatcher.answer(call, extra=fields, avoid=avoid)
        except (NoPods, BadGateway, GatewayTimeout) as error:
            if time.monotonic() >= ends:
                logger.warning("a stream found no other pod: %s", error)
                return None
            avoid = set()  # the lost pod may be back
        except DeadlinePassed:
            return None
        else:
            if attempt.stream:
                return attempt
            attempt.close()
            if attempt.status not in ELSEWHERE or time.monotonic() >= ends:
                logger.warning(
                    "pod %s does not go on with a stream: status %d %s",
                    attempt.pod.id,
                    attempt.status,
                    attempt.body[:200],
                )
                return None
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


async def _next_piece(
    dispatcher: Dispatcher, connection: Connection, pod: Pod, elsewhere: Callable[[], bool] | None = None
) -> bytes:
    """b"" at the end. `elsewhere`: whether another pod can go on."""
    if data := connection.taken():
        return data
    until = time.monotonic() + dispatcher.settings.idle_timeout
    return await dispatcher.wait_for(connection.read, pod, until, begun=True, elsewhere=elsewhere)


async def _keep(call: Call, data: bytes) -> None:
    """Store the answer of a stream, if it ends within `data`."""
    stored = call.dialect.stored
    if call.keep is not None and stored is not None and (answer := stored(data)) is not None:
        await call.keep(answer)


def _start_stream(call: Call, attempt: Attempt, client: Exchange) -> None:
    call.status = attempt.status
    headers = [
        pair
        for pair in response_headers(attempt.headers, keep_length=False)
        if pair[0] != b"x-accel-buffering"
    ]
    headers.append((b"x-accel-buffering", b"no"))
    if header(headers, b"cache-control") is None:
        headers.append((b"cache-control", b"no-cache"))
    client.start(attempt.status, _decorated(call, headers))


async def _break_off(call: Call, client: Exchange, message: str) -> None:
    """End a stream that cannot be saved in a way that clients notice: an error event and no [DONE]."""
    logger.error("%s (%s)", message, call.service.name)
    call.status = 502
    error = BadGateway("the pod was lost in mid-stream", code="upstream_lost")
    if not client.started:
        name = header(call.extra_headers, NAME)
        call.status, headers, body = answer_to(error, client.path, name)
        client.answer(call.status, headers + call.extra_headers, body)
        return
    last = call.dialect.failing(error.message, error.type, "upstream_lost", call.events)
    await client.write(last, more=False)


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
