"""Polls the progress of all starting pods, in a task beside the workers.

A poll never delays a pass: answers are kept in `reports`, which `plan` reads, and a service is queued only
when one of its pods has made a step. A step is another phase, or five percent of one. So loading a model
causes at most about twenty writes of status, and a pod without progress causes none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from leadline.operator.kube.store import Key, Store
from leadline.operator.periodic import repeat
from leadline.operator.planning.observed import StartReport, active_pods
from leadline.operator.probes.pod_probe import PodProbe, is_starting

__all__ = ["POLL_SECONDS", "StartProgress", "is_step"]

POLL_SECONDS = 2.0
_AT_ONCE = 64
_STEPS = 20


def is_step(report: StartReport, before: StartReport | None) -> bool:
    """Whether a report differs enough for the status. Numbers without a known fraction do not count."""
    return before is None or _step(report) != _step(before)


def _step(report: StartReport) -> tuple[str, int, str]:
    if not report.phase:
        return "", -1, _without_numbers(report.message)
    if report.fraction is None:
        return report.phase, -1, _without_numbers(report.detail)
    return report.phase, int(report.fraction * _STEPS + 1e-9), ""


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text)


class StartProgress:
    """`run` it as a task while this replica acts. `changed(service)` is called for each step."""

    def __init__(
        self,
        store: Store,
        probe: PodProbe,
        changed: Callable[[Key], None],
        is_ours: Callable[[dict[str, Any]], bool] = lambda service: True,
    ) -> None:
        self._store, self._probe, self._changed, self._is_ours = store, probe, changed, is_ours
        self._reports: dict[str, StartReport] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def reports(self, pods: list[dict[str, Any]]) -> dict[str, StartReport]:
        """Return the last step of those of `pods` that are starting, by uid."""
        uids = [str(pod["metadata"].get("uid")) for pod in pods]
        return {uid: self._reports[uid] for uid in uids if uid in self._reports}

    async def run(self) -> None:
        await repeat("progress of starting pods", self.look, POLL_SECONDS)

    async def look(self) -> None:
        """Ask every pod that starts, once."""
        starting = [(key, pod) for key in self._store.services() for pod in self._starting(key)]
        alive = {str(pod["metadata"]["uid"]) for _, pod in starting}
        for uid in self._reports.keys() - alive:
            del self._reports[uid]
        await asyncio.gather(*(self._ask(key, pod) for key, pod in starting))

    def _starting(self, key: Key) -> list[dict[str, Any]]:
        service = self._store.service(key)
        if service is None or not self._is_ours(service):
            return []
        return [pod for pod in active_pods(self._store.pods(key)) if is_starting(pod)]

    async def _ask(self, key: Key, pod: dict[str, Any]) -> None:
        async with self._gate:
            report = await self._probe.start_of(pod)
        uid = str(pod["metadata"]["uid"])
        if report is not None and is_step(report, self._reports.get(uid)):
            self._reports[uid] = report
            self._changed(key)
