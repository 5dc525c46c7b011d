"""Memory and speed of the gateway's prefix index at ten million entries (block-pod pairs).

    OMP_NUM_THREADS=1 python benchmarks/index_memory.py [--entries N] [--pods N] [--no-record]

Each workload fills a fresh index in a process of its own, in the 4,096-block steps in which a gateway loads
snapshots:

    distinct      every pod holds blocks that no other holds: most table slots an entry
    shared        runs of 20 blocks, each held by 1 to 8 pods: what documents and conversations look like
    scattered     every block held by 3 pods drawn for it alone: most pod sets; no service looks like this
    dict-of-sets  Python's dict of int → set of str, over "shared" at a tenth of the entries: the yardstick

Bytes an entry are given by the growth of the process's resident set (VmRSS) and by the sizes of the arrays.
"Worst" is the largest value of the arrays at any time after the first million entries, since tables fill and
split. The longest step is the longest that any single call kept the event loop, while filling from empty.
Match: a chain of 512 blocks. Store and remove: 160 blocks (a prompt of 10,240 tokens). Sweep: a maintain()
step after a pod was dropped. Times are the thread's CPU time, because other programs share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from leadline.gateway.index.prefix_index import LOAD_CHUNK, PrefixIndex

WORKLOADS = ("distinct", "shared", "scattered", "dict-of-sets")
RUN = 20


def resident_bytes() -> int:
    """VmRSS of this process, after what the C library holds of freed memory has gone back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Workload:
    """Who holds what. Made before the first look at the resident set, and so not counted."""

    def __init__(self, name: str, entries: int, pods: int) -> None:
        self.name, self.pods, self.each = name, pods, entries // pods
        self.length = RUN if name == "shared" else 1
        if name == "distinct":
            return
        # Holder `draw` of run `r` is the pod that a hash of both names; equal draws make one entry.
        mean, most = (4.5, 8) if name == "shared" else (3, 3)
        runs = np.arange(int(entries / mean / self.length), dtype=np.uint64)
        holders = scramble(runs + np.uint64(1 << 41)) % np.uint64(most) if name == "shared" else most - 1
        pairs = []
        for draw in range(most):
            pod = scramble(runs * np.uint64(most) + np.uint64(draw)) % np.uint64(pods)
            pairs.append(((pod << np.uint64(32)) | runs)[holders >= np.uint64(draw)])
        ordered = np.unique(np.concatenate(pairs))
        self._runs = (ordered & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        self._starts = np.searchsorted(ordered >> np.uint64(32), np.arange(pods + 1, dtype=np.uint64))

    def blocks(self, pod: int) -> np.ndarray:
        """The hashes that the pod holds."""
        if self.name == "distinct":
            return np.random.default_rng(pod).integers(0, 2**64, self.each, dtype=np.uint64)
        runs = self._runs[self._starts[pod] : self._starts[pod + 1]].astype(np.uint64)
        first = runs * np.uint64(self.length) + np.uint64(1 << 42)
        return scramble((first[:, None] + np.arange(self.length, dtype=np.uint64)).reshape(-1))


def scramble(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits that looks random (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def timings(call: Callable[[int], object], times: int) -> dict[str, float]:
    """Milliseconds of `times` calls: median, 99th percentile and longest."""
    taken = []
    for number in range(times):
        start = time.thread_time()
        call(number)
        taken.append((time.thread_time() - start) * 1e3)
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": max(taken)}


def measure_index(workload: str, entries: int, pods: int) -> dict[str, object]:
    load = Workload(workload, entries, pods)
    warm = PrefixIndex()
    warm.replace_pod("warm", "e", load.blocks(0))
    del warm
    before = resident_bytes()
    index, worst, longest, filling = PrefixIndex(), 0.0, 0.0, 0.0
    for pod in range(pods):
        steps: Iterator[None] = index.load_pod(f"pod-{pod}", "e", load.blocks(pod), LOAD_CHUNK)
        done = False
        while not done:
            start = time.thread_time()
            done = next(steps, index) is index
            taken = time.thread_time() - start
            longest, filling = max(longest, taken), filling + taken
        stats = index.stats()
        if stats.entries > 1_000_000:
            worst = max(worst, stats.bytes / stats.entries)
        if pod % 100 == 99:
            print(f"  {workload}: {stats.entries:,} entries", file=sys.stderr, flush=True)
    steps = iter(())
    stats = index.stats()
    resident = resident_bytes() - before

    rng = np.random.default_rng(1)
    chains = [load.blocks(pod)[:512].copy() for pod in range(0, pods, pods // 20)]
    fresh = [rng.integers(0, 2**64, 160, dtype=np.uint64) for _ in range(2_000)]
    known = [load.blocks(pod)[-160:].copy() for pod in range(0, pods, pods // 20)]
    lists = [chain.tolist() for chain in chains]
    numbers = {
        "match": timings(lambda n: index.match(chains[n % len(chains)]), 4_000),
        "match of ints": timings(lambda n: index.match(lists[n % len(lists)]), 2_000),
        "store new": timings(lambda n: index.store(f"pod-{n % pods}", "e", fresh[n]), 2_000),
        "remove": timings(lambda n: index.remove(f"pod-{n % pods}", "e", fresh[n]), 2_000),
        "store known": timings(lambda n: index.store("pod-1", "e", known[n % len(known)]), 20),
    }
    start = time.thread_time()
    index.drop("pod-0")
    numbers["drop"] = {"p50": (time.thread_time() - start) * 1e3}
    sweeps = []
    more = True
    while more:
        start = time.thread_time()
        more = index.sweep()
        sweeps.append((time.thread_time() - start) * 1e3)
    numbers["sweep"] = {"p50": float(np.median(sweeps)), "max": max(sweeps), "steps": len(sweeps)}
    return {
        "workload": workload,
        "entries": stats.entries,
        "blocks": stats.blocks,
        "pod_sets": stats.pod_sets,
        "rss": resident / stats.entries,
        "arrays": stats.bytes / stats.entries,
        "worst": worst,
        "longest": longest * 1e3,
        "rate": stats.entries / filling,
        "numbers": numbers,
    }


def measure_dict(entries: int, pods: int) -> dict[str, object]:
    load = Workload("shared", entries // 10, pods)
    before = resident_bytes()
    held: dict[int, set[str]] = {}
    start = time.thread_time()
    for pod in range(pods):
        name = f"pod-{pod}"
        for block in load.blocks(pod).tolist():
            held.setdefault(block, set()).add(name)
    filling = time.thread_time() - start
    count = sum(map(len, held.values()))
    return {
        "workload": "dict-of-sets",
        "entries": count,
        "blocks": len(held),
        "pod_sets": 0,
        "rss": (resident_bytes() - before) / count,
        "arrays": None,
        "worst": None,
        "longest": None,
        "rate": count / filling,
        "numbers": {},
    }


def show(results: list[dict]) -> None:
    print(
        f"\n{'workload':14}{'entries':>12}{'blocks':>12}{'pod sets':>11}"
        f"{'B/entry RSS':>13}{'arrays':>8}{'worst':>7}{'longest step':>14}{'filled/s':>12}"
    )
    for row in results:
        arrays = (
            f"{row['arrays']:8.1f}{row['worst']:7.1f}{row['longest']:11.1f} ms" if row["arrays"] else " " * 29
        )
        print(
            f"{row['workload']:14}{row['entries']:12,}{row['blocks']:12,}{row['pod_sets']:11,}"
            f"{row['rss']:13.1f}{arrays}{row['rate']:12,.0f}"
        )
    print(f"\n{'milliseconds':14}{'operation':16}{'p50':>9}{'p99':>9}{'max':>9}")
    for row in results:
        for name, values in row["numbers"].items():
            cells = "".join(
                f"{values[key]:9.3f}" if key in values else " " * 9 for key in ("p50", "p99", "max")
            )
            print(f"{row['workload']:14}{name:16}{cells}")


def save(results: list[dict]) -> None:
    from record import record

    peer = next((row["rss"] for row in results if row["workload"] == "dict-of-sets"), None)
    for row in results:
        if row["workload"] == "dict-of-sets":
            name = f"prefix index, shared, {row['entries']:,} entries"
            python = sys.version.split()[0]
            record(
                name, round(row["rss"], 1), "bytes/entry RSS", engine="dict of sets", engine_version=python
            )
            continue
        name = f"prefix index, {row['workload']}, {row['entries']:,} entries"
        ratio = round(row["rss"] / peer, 4) if peer and row["workload"] == "shared" else None
        record(name, round(row["rss"], 1), "bytes/entry RSS", peer_ratio=ratio)
        record(name, round(row["worst"], 1), "bytes/entry arrays, worst while growing")
        record(f"{name}: longest step while filling", round(row["longest"], 2), "ms")
        record(f"{name}: match of 512 blocks", round(row["numbers"]["match"]["p50"], 4), "ms p50")
        record(f"{name}: store of 160 new blocks", round(row["numbers"]["store new"]["p50"], 4), "ms p50")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--pods", type=int, default=1_000)
    parser.add_argument("--only", choices=WORKLOADS, help="measure this one here, and print JSON")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.jsonl alone")
    options = parser.parse_args()
    if options.only == "dict-of-sets":
        print(json.dumps(measure_dict(options.entries, options.pods)))
        return
    if options.only:
        print(json.dumps(measure_index(options.only, options.entries, options.pods)))
        return
    results = []
    for workload in WORKLOADS:
        command = [sys.executable, __file__, "--only", workload]
        command += ["--entries", str(options.entries), "--pods", str(options.pods)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout))
    show(results)
    if not options.no_record:
        save(results)


if __name__ == "__main__":
    main()
