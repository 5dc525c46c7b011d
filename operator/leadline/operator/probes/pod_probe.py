"""Asks engine pods over HTTP: those that start how far they are (/ready), those that serve how much they do
(/metrics, of gateways too).

A pod that does not answer (no route, not listening yet) has nothing to say; that is no error.
While a model is downloaded by the pod's init container, that one answers, in the same words.
"""

from __future__ import annotations

import json
import math
from typing import Any

import aiohttp

from leadline.operator.names import CONTAINER, DOWNLOAD_CONTAINER, PORT
from leadline.operator.planning.diagnosis import is_ready
from leadline.operator.planning.observed import StartReport

__all__ = ["PodProbe", "is_starting", "parse_start"]

_TIMEOUT = aiohttp.ClientTimeout(total=1.5, connect=1.0)
_MAX_BYTES = 4096
_MAX_METRICS = 1 << 20


class PodProbe:
    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False)

    async def close(self) -> None:
        await self._session.close()

    async def start_of(self, pod: dict[str, Any]) -> StartReport | None:
        """What a pod that is not ready says; None if it says nothing within 1.5 s."""
        try:
            url = _url(pod["status"]["podIP"], "/ready", PORT)
            async with self._session.get(url, allow_redirects=False) as response:
                body = await _whole(response, _MAX_BYTES)
                return None if body is None else parse_start(body)
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def metrics(self, address: str, port: int = PORT, *, most: int = _MAX_METRICS) -> str | None:
        """The text of /metrics; None from one that does not answer in 1.5 s, or with more than `most`
        bytes: a part of them would tell wrong numbers."""
        try:
            url = _url(address, "/metrics", port)
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return None
                body = await _whole(response, most)
                return None if body is None else body.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError):
            return None


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body; None for one of more than `most` bytes. A single `read` gives what has come so far."""
    body = bytearray()
    while piece := await response.content.read(most + 1 - len(body)):
        body += piece
        if len(body) > most:
            return None
    return bytes(body)


def parse_start(body: bytes) -> StartReport | None:
    """Return what an answer of /ready that is no 200 reports; None for one that says nothing. A team may run
    any image, so the body may be anything."""
    try:
        answer = json.loads(body)
        message = str((answer.get("error") or {}).get("message") or "")
        told = answer.get("progress") or {}
        share = told.get("fraction")
        fraction = math.nan if share is None else min(max(float(share), 0.0), 1.0)
        report = StartReport(
            message,
            str(told.get("phase") or ""),
            None if math.isnan(fraction) else fraction,
            str(told.get("detail") or ""),
        )
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return None
    return report if report.message or report.phase else None


def _url(address: str, path: str, port: int) -> str:
    return f"http://[{address}]:{port}{path}" if ":" in address else f"http://{address}:{port}{path}"


def is_starting(pod: dict[str, Any]) -> bool:
    """Whether a pod runs something that may be asked, and is not ready."""
    status = pod.get("status", {})
    if is_ready(pod) or not status.get("podIP"):
        return False
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return any(
        one.get("name") in (CONTAINER, DOWNLOAD_CONTAINER) and "running" in one.get("state", {})
        for one in containers
    )
