"""Which load reports are new, which pods have fallen silent, and which pod a report belongs to. Pure; the
caller gives the times.

Redis keeps a pod's last report, so its presence means nothing: a pod is alive while its report changes. How
long it has not changed is measured on our own clock, and only over the time in which we could read.

    report changes                       → new
    unchanged for `silent_after`         → silent: what we know about its cache is dropped
    missing for `missing_after`          → silent: signed off (after a flush pods are back in a second)
    unchanged for `forget_after`         → dead: its field is to be deleted

A report seen for the first time may be years old. It is new if its own time stamp is young by our clock;
otherwise (a dead pod, or a clock that is off) the pod has to change it first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from leadline.gateway.pods import Pod
from leadline.protocol.load import LoadReport, decode_report
from leadline.protocol.wire import WireError

__all__ = ["Changes", "FindPod", "Heartbeats", "find_in"]


FindPod = Callable[[LoadReport], Pod | None]
"""Finds the pod that sent a report, by name or address; None if discovery does not know it (yet)."""


def find_in(pods: Mapping[str, Pod]) -> FindPod:
    """Look a report's pod up in `pods` (id → pod, as discovery keeps it): by its name as the id, else by the
    address it reports (a static list knows no names)."""
    by_name: dict[str, str] = {}

    def find(report: LoadReport) -> Pod | None:
        pod = pods.get(report.pod)
        if pod is not None:
            return pod
        pod = pods.get(by_name.get(report.pod, ""))
        if pod is None or pod.address != report.address:
            pod = next((pod for pod in pods.values() if pod.address == report.address), None)
            if pod is not None:
                by_name[report.pod] = pod.id
        return pod

    return find


@dataclass(slots=True)
class _Entry:
    raw: bytes
    changed_at: float
    alive: bool
    missing_since: float | None = None


@dataclass(slots=True)
class Changes:
    """The result of one reading of all reports."""

    reports: list[LoadReport]
    silent: list[str]
    """Pods that were alive and are no longer, by the name they report."""
    dead: list[str]


class Heartbeats:
    """Reports of one service's pods, by the name they report."""

    __slots__ = ("_entries", "forget_after", "missing_after", "silent_after")

    def __init__(
        self, *, silent_after: float = 30.0, missing_after: float = 3.0, forget_after: float = 600.0
    ) -> None:
        self._entries: dict[str, _Entry] = {}
        self.silent_after = silent_after
        self.missing_after = missing_after
        self.forget_after = forget_after

    def resumed(self, now: float) -> None:
        """Note that reading begins (again): the time in which we did not read counts against no pod."""
        for entry in self._entries.values():
            entry.changed_at = max(entry.changed_at, now)
            entry.missing_since = None

    def read(self, fields: Mapping[bytes, bytes], now: float, wall: float) -> Changes:
        """All reports as Redis has them. `now` is monotonic, `wall` seconds since the Unix epoch."""
        changes = Changes([], [], [])
        present = set()
        for key, raw in fields.items():
            name = key.decode("utf-8", "replace")
            present.add(name)
            entry = self._entries.get(name)
            if entry is not None and entry.raw == raw:
                entry.missing_since = None
                self._age(name, entry, now, changes)
                continue
            try:
                report = decode_report(raw)
            except WireError:
                report = None
            young = report is not None and (entry is not None or abs(wall - report.time) < self.silent_after)
            self._entries[name] = _Entry(raw, now, young)
            if young and report is not None:
                changes.reports.append(report)
            elif entry is not None and entry.alive:
                changes.silent.append(name)
        for name in [name for name in self._entries if name not in present]:
            entry = self._entries[name]
            if entry.missing_since is None:
                entry.missing_since = now
            if now - entry.missing_since >= self.missing_after:
                del self._entries[name]
                if entry.alive:
                    changes.silent.append(name)
        return changes

    def _age(self, name: str, entry: _Entry, now: float, changes: Changes) -> None:
        age = now - entry.changed_at
        if entry.alive and age >= self.silent_after:
            entry.alive = False
            changes.silent.append(name)
        if age >= self.forget_after:
            changes.dead.append(name)
