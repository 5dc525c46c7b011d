"""One line of JSON a request on standard output. No prompts, no answers, no keys.

Lines are collected and written every `FLUSH_SECONDS`, since a write a request costs as much as the rest.
"""

import asyncio
import sys
import time
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

from leadline.gateway.access.principal import Principal
from leadline.gateway.request.context import Call
from leadline.protocol.http.exchange import Exchange

__all__ = ["FLUSH_SECONDS", "AccessLog"]

FLUSH_SECONDS = 0.2
_encode_lines = msgspec.json.Encoder().encode_lines


class _Line(msgspec.Struct, gc=False):
    """The fields of every line. Times in seconds."""

    time: float
    client: str | None
    method: str
    path: str
    status: int
    seconds: float
    tenant: str | None
    key: str | None
    request_id: str


class _ServedLine(_Line, kw_only=True, gc=False):
    """Of one that got as far as a service. A field that does not apply is left out."""

    service: str
    pod: str | None
    stream: bool
    attempts: int
    migrations: int
    prompt_tokens: int
    predicted_cached_tokens: int
    completion_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    first_byte_seconds: float | UnsetType = UNSET


class AccessLog:
    def __init__(self, out: BinaryIO | None = None) -> None:
        self._out = out or sys.stdout.buffer
        self._lines: list[_Line] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(
        self,
        exchange: Exchange,
        request_id: bytes,
        arrived: float,
        status: int,
        call: Call | None,
        principal: Principal | None,
    ) -> None:
        """`status`: where there is no call."""
        seconds = round(time.monotonic() - arrived, 6)
        tenant, key = (principal.tenant, principal.name) if principal is not None else (None, None)
        at, method = round(time.time(), 3), exchange.method.decode("latin-1")
        known = request_id.decode("ascii")
        if call is None:
            self._lines.append(
                _Line(at, exchange.client, method, exchange.path, status, seconds, tenant, key, known)
            )
        else:
            usage, decision = call.usage, call.decision
            cached = usage.prompt_tokens_details if usage is not None else None
            line = _ServedLine(
                at,
                exchange.client,
                method,
                exchange.path,
                call.status,
                seconds,
                tenant,
                key,
                known,
                service=call.service.name,
                pod=decision.pod.id if decision is not None else None,
                stream=call.incoming.stream,
                attempts=call.attempts,
                migrations=call.migrations,
                prompt_tokens=usage.prompt_tokens if usage is not None else call.prompt.tokens,
                predicted_cached_tokens=call.predicted,
                completion_tokens=usage.completion_tokens if usage is not None else call.output or UNSET,
                cached_tokens=cached.cached_tokens if cached is not None else UNSET,
                first_byte_seconds=round(call.first_byte_at - arrived, 6) if call.first_byte_at else UNSET,
            )
            self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            self._out.write(_encode_lines(lines))
            self._out.flush()
