"""Asks engine pods that are starting how far they are: the detail of their /ready.

Room: operator. A pod that does not answer (no route, not listening yet) has no detail; that is no error.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from leadline.operator.diagnosis import is_ready
from leadline.operator.names import CONTAINER, PORT
from leadline.operator.observed import active_pods

__all__ = ["ProgressProbe"]

_TIMEOUT = aiohttp.ClientTimeout(total=1.5, connect=1.0)
_MAX_BYTES = 4096


class ProgressProbe:
    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False)

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, pods: list[dict[str, Any]]) -> dict[str, str]:
        """Pod uid → detail, of the pods that run and are not ready. Takes 1.5 s at most."""
        starting = [pod for pod in active_pods(pods) if _is_starting(pod)]
        details = await asyncio.gather(*(self._detail(pod["status"]["podIP"]) for pod in starting))
        return {
            str(pod["metadata"]["uid"]): detail
            for pod, detail in zip(starting, details, strict=True)
            if detail
        }

    async def _detail(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._session.get(f"http://{host}:{PORT}/ready", allow_redirects=False) as response:
                body = await response.content.read(_MAX_BYTES)
            return str(json.loads(body)["error"]["message"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return ""


def _is_starting(pod: dict[str, Any]) -> bool:
    status = pod.get("status", {})
    if is_ready(pod) or not status.get("podIP"):
        return False
    return any(
        one.get("name") == CONTAINER and "running" in one.get("state", {})
        for one in status.get("containerStatuses") or []
    )
