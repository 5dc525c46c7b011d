"""Results of the matrix as Markdown, as a plot, and as flat rows for results.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leadline.cli.matrix.makeup import PARTS

__all__ = ["markdown", "plot", "rows"]

_MEASURES = (("ttft", "TTFT p50", "s"), ("tpot", "TPOT p50", "s"), ("throughput", "output", "tokens/s"))


def markdown(result: dict[str, Any]) -> str:
    """Two tables, and what was not run."""
    out = [
        f"{result['model']} on {result['machine']}; {result['size']}, unless a row says less. Medians of up "
        f"to {result['rounds']} rounds, on and off in turn.",
        "",
        "| technique | workload | TTFT off → on, ms | TPOT off → on, ms | output off → on, tok/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in result["techniques"].items():
        if "on" in entry:
            cells = [_change(entry, key, 1.0 if key == "throughput" else 1e3) for key, _, _ in _MEASURES]
            out.append(f"| {name} | {_workload(entry)} | " + " | ".join(cells) + " |")
    out.append("")
    if parts := _parts(result):
        out += ["| where a request's time goes | ms | share |", "| --- | --- | --- |"]
        total = sum(parts.values())
        for part, seconds in parts.items():
            out.append(f"| {part} | {seconds * 1e3:.2f} | {seconds / total:.1%} |")
        out += [f"| mean latency | {total * 1e3:.2f} | |", ""]
    for name, entry in [*result["techniques"].items(), ("make-up of the latency", result["makeup"])]:
        for key, what in (("not_run", "Not run"), ("failed", "Failed")):
            if key in entry:
                out.append(f"{what}: {name} ({entry[key]}).")
    return "\n".join(out).rstrip("\n") + "\n"


def _parts(result: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, in their order; empty where they were not measured."""
    makeup = result["makeup"]
    return {part: makeup[part] for part in PARTS if part in makeup}


def _workload(entry: dict[str, Any]) -> str:
    accepted = entry.get("accepted_share")
    drafts = "" if accepted is None else f", {accepted:.0%} of drafts accepted"
    return f"{entry['workload']}, {entry['requests']} requests{drafts}"


def _change(entry: dict[str, Any], key: str, scale: float) -> str:
    off, on = entry["off"][key], entry["on"][key]
    return f"{off * scale:.4g} → {on * scale:.4g} ({on / off - 1:+.0%})"


def rows(result: dict[str, Any]) -> list[tuple[str, float, str, float | None]]:
    """(workload, value, unit, ratio of on to off): one a measurement."""
    out: list[tuple[str, float, str, float | None]] = []
    for name, entry in result["techniques"].items():
        if "on" not in entry:
            continue
        for key, label, unit in _MEASURES:
            off, on = entry["off"][key], entry["on"][key]
            where = f"bench matrix, {result['model']}, {name}"
            out.append((f"{where} off: {label}", off, unit, None))
            out.append((f"{where} on: {label}", on, unit, on / off))
    parts = _parts(result)
    total = sum(parts.values())
    for part, seconds in parts.items():
        out.append(
            (f"bench matrix, {result['model']}, latency make-up: {part}", seconds / total, "share", None)
        )
    return out


def plot(result: dict[str, Any], path: Path) -> None:
    """Change of each measure by technique, and the make-up of a request's latency, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ran = {name: entry for name, entry in result["techniques"].items() if "on" in entry}
    figure, (left, right) = plt.subplots(
        2, 1, figsize=(11, 7.6), height_ratios=(3, 1.3), constrained_layout=True
    )
    colours = {"ttft": "#4a90c2", "tpot": "#e0a030", "throughput": "#0b6e4f"}
    for offset, (key, label, _) in enumerate(_MEASURES):
        places = [place + (offset - 1) * 0.27 for place in range(len(ran))]
        changes = [100 * (entry["on"][key] / entry["off"][key] - 1) for entry in ran.values()]
        bars = left.bar(places, changes, 0.25, color=colours[key], label=label)
        left.bar_label(bars, [f"{change:+.0f}" for change in changes], fontsize=8, padding=2)
    left.axhline(0, color="#303030", linewidth=0.8)
    left.set_xticks(range(len(ran)), list(ran), fontsize=9)
    left.set(ylabel="change by switching it on, %", title="Each technique alone")
    left.set_yscale("symlog", linthresh=100)
    left.margins(y=0.15)
    left.legend(frameon=False, ncols=3, loc="upper center")

    start, shades, parts = 0.0, plt.get_cmap("tab10"), _parts(result)
    total = sum(parts.values())
    for number, (part, seconds) in enumerate(parts.items()):
        share = 100 * seconds / total
        right.barh([0], [share], left=start, color=shades(number), label=f"{part} {share:.1f} %")
        start += share
    right.set(xlim=(0, 100), yticks=[], xlabel="% of a request's latency")
    right.set_title(f"Where {1e3 * total:.0f} ms go")
    if parts:
        right.legend(frameon=False, ncols=5, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.suptitle(f"{result['model']}, {result['machine']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
