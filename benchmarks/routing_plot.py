"""Draws what routing_simulation.py measured: hit rate, time to first token and throughput of each policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["plot"]

COLOURS = {"prefix": "#0b6e4f", "session": "#4a90c2", "least-load": "#e0a030", "random": "#b0b0b0"}
DARK = ("prefix", "session")


def plot(results: dict[tuple[int, str], dict[str, float]], title: str, path: Path) -> None:
    """`results`: (pods, policy) → the numbers of one run. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), constrained_layout=True)
    bars(axes[0], results, lambda pods, row: row["hit rate"] * 100, "{:.0f}")
    axes[0].set(title="Prompt tokens found in cache", ylabel="%")
    bars(axes[1], results, lambda pods, row: row["TTFT p50"], "{:.2f}", lambda pods, row: row["TTFT p90"])
    axes[1].set(
        title="Time to first token (bar: p50, whisker: p90)", ylabel="seconds, log scale", yscale="log"
    )
    axes[1].yaxis.set_major_formatter("{x:g}")
    bars(axes[2], results, lambda pods, row: row["tokens/s"] / pods, "{:.0f}")
    axes[2].set(title="Output tokens per second per pod", ylabel="tokens/s")
    for axis in axes:
        axis.margins(y=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.suptitle(title, fontsize=12.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


Value = Callable[[int, dict[str, float]], float]


def bars(
    axis: Any,
    results: dict[tuple[int, str], dict[str, float]],
    value: Value,
    form: str,
    whisker: Value | None = None,
) -> None:
    """A group of bars for each fleet; with a whisker, its end is labelled above and the bar inside."""
    fleets = sorted({pods for pods, _ in results})
    policies = [policy for policy in COLOURS if any((pods, policy) in results for pods in fleets)]
    width = 0.8 / len(policies)
    label = {"ha": "center", "fontsize": 8.5, "textcoords": "offset points"}
    for offset, policy in enumerate(policies):
        places = [group + (offset - (len(policies) - 1) / 2) * width for group in range(len(fleets))]
        heights = [value(pods, results[pods, policy]) for pods in fleets]
        axis.bar(places, heights, width * 0.92, color=COLOURS[policy], label=policy)
        for pods, place, height in zip(fleets, places, heights, strict=True):
            top = height
            if whisker is not None:
                top = whisker(pods, results[pods, policy])
                axis.vlines(place, height, top, color="#333333", linewidth=1.5)
                axis.hlines(top, place - width / 4, place + width / 4, color="#333333", linewidth=1.5)
                colour = "white" if policy in DARK else "black"
                axis.annotate(form.format(height), (place, height), (0, -3), va="top", color=colour, **label)
            axis.annotate(form.format(top), (place, top), (0, 3), va="bottom", **label)
    axis.set_xticks(range(len(fleets)), [f"{pods:,} pods" for pods in fleets])
    axis.spines[["top", "right"]].set_visible(False)
