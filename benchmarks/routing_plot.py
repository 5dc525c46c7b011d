"""Draws what the routing benchmarks measured: hit rate, time to first token and throughput of each policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["plot"]

COLOURS = {"prefix": "#0b6e4f", "session": "#4a90c2", "least-load": "#e0a030", "random": "#b0b0b0"}
DARK = ("prefix", "session")


def plot(
    results: dict[tuple[str, str], dict[str, float]],
    title: str,
    path: Path,
    throughput: str = "Output tokens per second",
) -> None:
    """`results`: (group, policy) → the numbers of one run. Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), constrained_layout=True)
    bars(axes[0], results, lambda row: row["hit rate"] * 100, "{:.0f}")
    axes[0].set(title="Prompt tokens found in cache", ylabel="%")
    bars(axes[1], results, lambda row: row["TTFT p50"], "{:.2g}", lambda row: row["TTFT p90"])
    axes[1].set(
        title="Time to first token (bar: p50, whisker: p90)", ylabel="seconds, log scale", yscale="log"
    )
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_formatter("")
    bars(axes[2], results, lambda row: row["tokens/s"], "{:,.0f}")
    axes[2].set(title=throughput, ylabel="tokens/s")
    for axis in axes:
        axis.margins(y=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


Value = Callable[[dict[str, float]], float]


def bars(
    axis: Any,
    results: dict[tuple[str, str], dict[str, float]],
    value: Value,
    form: str,
    whisker: Value | None = None,
) -> None:
    """The bars of each group; with a whisker, its end is labelled above and the bar inside."""
    groups = list(dict.fromkeys(group for group, _ in results))
    policies = [policy for policy in COLOURS if any((group, policy) in results for group in groups)]
    width = 0.8 / len(policies)
    label = {"ha": "center", "fontsize": 8.5, "textcoords": "offset points"}
    for offset, policy in enumerate(policies):
        places = [place + (offset - (len(policies) - 1) / 2) * width for place in range(len(groups))]
        heights = [value(results[group, policy]) for group in groups]
        axis.bar(places, heights, width * 0.92, color=COLOURS[policy], label=policy)
        for group, place, height in zip(groups, places, heights, strict=True):
            top = height
            if whisker is not None:
                top = whisker(results[group, policy])
                axis.vlines(place, height, top, color="#333333", linewidth=1.5)
                axis.hlines(top, place - width / 4, place + width / 4, color="#333333", linewidth=1.5)
                colour = "white" if policy in DARK else "black"
                axis.annotate(form.format(height), (place, height), (0, -3), va="top", color=colour, **label)
            axis.annotate(form.format(top), (place, top), (0, 3), va="bottom", **label)
    axis.set_xticks(range(len(groups)), groups)
    axis.spines[["top", "right"]].set_visible(False)
