"""One line of JSON a request on standard output. No prompts, no answers, no keys.

Lines are collected and written every `FLUSH_SECONDS`, since a write a request costs as much as the rest.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from leadline.gateway.proxy.call import Call

__all__ = ["FLUSH_SECONDS", "AccessLog"]

FLUSH_SECONDS = 0.2
_encode = msgspec.json.Encoder().encode


class AccessLog:
    def __init__(self, out: BinaryIO | None = None) -> None:
        self._out = out or sys.stdout.buffer
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(
        self, scope: Mapping[str, Any], arrived: float, status: int, call: Call | None, principal: Any
    ) -> None:
        now = time.monotonic()
        peer = scope.get("client")
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "client": peer[0] if peer else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": call.status if call is not None else status,
            "seconds": round(now - arrived, 6),
            "tenant": getattr(principal, "tenant", None),
            "key": getattr(principal, "name", None),
        }
        if call is not None:
            usage, decision = call.usage, call.decision
            line |= {
                "service": call.service.name,
                "pod": decision.pod.id if decision is not None else None,
                "stream": call.incoming.stream,
                "attempts": call.attempts,
                "migrations": call.migrations,
                "prompt_tokens": usage.prompt_tokens if usage is not None else call.prompt.tokens,
                "predicted_cached_tokens": call.predicted,
            }
            if usage is not None:
                line["completion_tokens"] = usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    line["cached_tokens"] = usage.prompt_tokens_details.cached_tokens
            if call.first_byte_at:
                line["first_byte_seconds"] = round(call.first_byte_at - arrived, 6)
        self._lines.append(_encode(line))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            self._out.write(b"\n".join(lines) + b"\n")
            self._out.flush()
