"""How much of a request's time to first token is the engine's, and how much lies in front of it.

Each counts from when it has the request in hand. All are means over the same requests, from the sums and
counts of histograms, so their differences are exact whatever the buckets:

    client   |--------------------------------- TTFT ----------------------------------|
    gateway    |- routing -|- queue -|----------------------------------------------|
    engine                              |------ tokenize, queue, prefill -------|
              connect, read           read and parse                          relay

The gateway's queue is where requests wait while no pod has free capacity: that is the engines' load, not its
own time.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Sequence

__all__ = ["Times", "mean_seconds", "read_times"]

Times = dict[str, tuple[float, float]]
"""Name → (sum in seconds, count) since the servers started."""

_TTFT = "time_to_first_token_seconds"
_GATEWAY = {
    "gateway": f"leadline_gateway_{_TTFT}",
    "routing": "leadline_gateway_routing_seconds",
    "queue": "leadline_gateway_queue_seconds",
}
_ENGINE = {"engine": f"leadline_engine_{_TTFT}"}


def read_times(gateway: str, engines: Iterable[str]) -> Times:
    """From `GET /metrics` of the gateway and of all engines, which are added up. Blocks for a moment."""
    return _read([gateway], _GATEWAY) | _read(engines, _ENGINE)


def mean_seconds(runs: Sequence[tuple[Times, Times]]) -> dict[str, float]:
    """Mean seconds of a request by name, of what was observed between the two readings of each run.

    `routing`: tokenizing, matching the prefix and picking; `queue`: of all requests, those that did not wait
    included; `gateway_own`: what the gateway saw beyond the engine's time and its queue.
    """
    seconds, counts = {}, {}
    for name in (*_GATEWAY, *_ENGINE):
        seconds[name] = sum(after[name][0] - before[name][0] for before, after in runs)
        counts[name] = sum(after[name][1] - before[name][1] for before, after in runs)
    counts["queue"] = counts["gateway"]
    means = {name: seconds[name] / counts[name] if counts[name] else 0.0 for name in seconds}
    means["gateway_own"] = means["gateway"] - means["engine"] - means["queue"]
    return means


def _read(urls: Iterable[str], names: dict[str, str]) -> Times:
    found = {name: [0.0, 0.0] for name in names}
    ends = {
        f"{series}_{end}": (name, place)
        for name, series in names.items()
        for place, end in enumerate(("sum", "count"))
    }
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        for line in lines:
            series, _, value = line.rpartition(" ")
            if where := ends.get(series.partition("{")[0]):
                found[where[0]][where[1]] += float(value)
    return {name: (total, count) for name, (total, count) in found.items()}
