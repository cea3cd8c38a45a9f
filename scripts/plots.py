"""The plots of docs/, from the result files that they show: `.venv/bin/python scripts/plots.py
[FOLDER]` (docs).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks come with the repository, and are not installed

from benchmarks.results import read  # noqa: E402
from benchmarks.serving.summary import case  # noqa: E402
from benchmarks.serving.systems import SYSTEMS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SERIES = {
    "recompute": ("recomputed", "#8a8a8a", "o"),
    "mp": ("LMCache MP server, host memory", "#c1762b", "s"),
    "lmcache": ("vcache through LMCache, hit on the other GPU", "#7f5fb0", "v"),
    "vcache": ("vcache, hit on the other GPU", "#1f6fb4", "D"),
    "prefix": ("vLLM's own prefix cache", "#3a8f4d", "^"),
}
COLOURS = {
    "alone": "#8a8a8a",
    "offload": "#3a8f4d",
    "mp": "#c1762b",
    "vcache": "#1f6fb4",
    "inplace": "#123f75",
}
WORKLOADS = {"prefix": "prefix repetition", "trace": "conversation trace"}
PANELS = {"requests_per_second": "requests/s", "ttft_p50": "median TTFT, ms"}
LABEL_POINTS = 11
"""Between the figures at the ends of lines."""


def first_token(result: Path, picture: Path) -> None:
    """Time to first token against prompt length, log-log."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read(result):
        named = re.fullmatch(r"vllm_(\w+?)_ms_\w+", row.case)
        if (
            named
            and named[1] in SERIES
            and (length := re.search(r"TTFT of (\d+) tokens", row.what))
        ):
            points.setdefault(named[1], []).append((int(length[1]), row.value))
    figure, axes = pyplot.subplots(figsize=(7, 4.3), layout="constrained")
    for name, (label, colour, marker) in SERIES.items():
        if name in points:
            lengths, values = zip(*sorted(points[name]), strict=True)
            axes.plot(
                lengths,
                values,
                color=colour,
                marker=marker,
                label=label,
                linewidth=1.8,
                markersize=5,
            )
    axes.set(
        xscale="log", yscale="log", xlabel="prompt length, tokens", ylabel="time to first token, ms"
    )
    ticks = sorted({length for series in points.values() for length, _ in series})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False)
    figure.canvas.draw()
    lowest = -1e9
    for (tokens, value), name in sorted((max(series), name) for name, series in points.items()):
        at = axes.transData.transform((tokens, value))[1] * 72 / figure.dpi
        lowest = max(at, lowest + LABEL_POINTS)
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        offset = (7, lowest - at - 3)
        axes.annotate(
            text, (tokens, value), textcoords="offset points", xytext=offset, color=SERIES[name][1]
        )
    save(figure, [axes], picture)


def serving(result: Path, picture: Path) -> None:
    """Throughput and time to first token of each system, bars for each workload."""
    values = {row.case: row.value for row in read(result)}
    figure, grid = pyplot.subplots(
        len(WORKLOADS), len(PANELS), figsize=(9, 5), layout="constrained"
    )
    for line, workload in zip(grid, WORKLOADS, strict=True):
        for axes, (which, title) in zip(line, PANELS.items(), strict=True):
            there = [system for system in SYSTEMS if case(system, workload, which) in values]
            shown = [values[case(system, workload, which)] for system in there]
            bars = axes.barh(
                [SYSTEMS[one].label for one in there],
                shown,
                color=[COLOURS.get(one, "#7f5fb0") for one in there],
            )
            axes.bar_label(bars, fmt="%.4g", padding=3)
            axes.set_title(f"{WORKLOADS[workload]}: {title}", fontsize=10)
            axes.margins(x=0.18)
            axes.invert_yaxis()
            if axes is not line[0]:
                axes.set_yticklabels([])
    save(figure, grid.flat, picture)


def save(figure: Any, all_axes: Any, picture: Path) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "vcache"
    first_token(RESULTS / "h200x4-vllm-connector-2026-11-21.json", folder / "vllm-ttft.svg")
    serving(RESULTS / "h200x4-inplace-2026-11-22.json", folder / "vllm-throughput.svg")


if __name__ == "__main__":
    main()
