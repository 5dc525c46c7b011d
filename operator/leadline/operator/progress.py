"""Asks engine pods: those that start how far they are (/ready), those that serve how much they do (/metrics).

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

__all__ = ["ProgressProbe", "parse_in_flight"]

_TIMEOUT = aiohttp.ClientTimeout(total=1.5, connect=1.0)
_MAX_BYTES = 4096
_MAX_METRICS = 1 << 20


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

    async def in_flight(self, pods: list[dict[str, Any]]) -> list[float | None]:
        """Requests that each ready pod holds, waiting or running; None for a pod that does not say."""
        ready = [pod for pod in active_pods(pods) if is_ready(pod) and pod["status"].get("podIP")]
        return list(await asyncio.gather(*(self._load(pod["status"]["podIP"]) for pod in ready)))

    async def _load(self, address: str) -> float | None:
        try:
            async with self._session.get(_url(address, "/metrics"), allow_redirects=False) as response:
                if response.status != 200:
                    return None
                text = (await response.content.read(_MAX_METRICS)).decode("utf-8", "replace")
            return parse_in_flight(text)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _detail(self, address: str) -> str:
        try:
            async with self._session.get(_url(address, "/ready"), allow_redirects=False) as response:
                body = await response.content.read(_MAX_BYTES)
            return str(json.loads(body)["error"]["message"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return ""


def parse_in_flight(text: str) -> float | None:
    """Running and waiting requests in an engine's metrics; None if it does not tell. Raises ValueError."""
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("leadline_engine_running_requests", "leadline_engine_waiting_requests"))
    ]
    return sum(values) if values else None


def _url(address: str, path: str) -> str:
    return f"http://[{address}]:{PORT}{path}" if ":" in address else f"http://{address}:{PORT}{path}"


def _is_starting(pod: dict[str, Any]) -> bool:
    status = pod.get("status", {})
    if is_ready(pod) or not status.get("podIP"):
        return False
    return any(
        one.get("name") == CONTAINER and "running" in one.get("state", {})
        for one in status.get("containerStatuses") or []
    )
