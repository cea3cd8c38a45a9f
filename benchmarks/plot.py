"""Pictures of result files. Needs matplotlib."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .results import read

SERIES = {
    "recompute": ("recomputed", "#8a8a8a", "o"),
    "mp": ("LMCache MP server, host memory", "#c1762b", "s"),
    "lmcache": ("vcache through LMCache, hit on the other GPU", "#7f5fb0", "v"),
    "vcache": ("vcache, hit on the other GPU", "#1f6fb4", "D"),
    "prefix": ("vLLM's own prefix cache", "#3a8f4d", "^"),
}
WORKLOADS = {"prefix": "prefix repetition", "trace": "conversation trace"}
PANELS = {"requests_per_second": "requests a second", "ttft_p50": "median time to first token, ms"}


def first_token(result: Path, picture: Path) -> None:
    """TTFT against prompt length, log-log, of our own connector's rows where the file has them, else of LMCache's.

    Raises ValueError if the file has no such rows.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    rows = read(result)
    which = "vllm" if any(row.case.startswith("vllm_prefix_ms_") for row in rows) else "lmcache"
    for row in rows:
        match = re.fullmatch(which + r"_(\w+?)_ms_\w+", row.case)
        if match and match[1] in SERIES and (length := re.search(r"TTFT of (\d+) tokens", row.what)):
            points.setdefault(match[1], []).append((int(length[1]), row.value))
    if not points:
        raise ValueError(f"{result}: no rows INTEGRATION_VARIANT_ms_LENGTH; run the part `ttft` first")
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.3))
    for name, (label, colour, marker) in SERIES.items():
        if name in points:
            lengths, values = zip(*sorted(points[name]), strict=True)
            axes.plot(lengths, values, color=colour, marker=marker, label=label, linewidth=1.8, markersize=5)
            text = f"{values[-1]:,.0f}" if values[-1] >= 100 else f"{values[-1]:.3g}"
            axes.annotate(text, (lengths[-1], values[-1]), textcoords="offset points", xytext=(7, -3), color=colour)
    axes.set(xscale="log", yscale="log", xlabel="prompt length, tokens", ylabel="time to first token, ms")
    ticks = sorted({length for series in points.values() for length, _ in series})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.legend(frameon=False)
    _save(pyplot, figure, [axes], picture)


def serving(result: Path, picture: Path) -> None:
    """Throughput and time to first token of each system, bars for each workload. Raises ValueError if the file has no such rows."""
    from .serving.summary import case
    from .serving.systems import SYSTEMS

    values = {row.case: row.value for row in read(result)}
    shown = [name for name in WORKLOADS if any(case(system, name, figure) in values for system in SYSTEMS for figure in PANELS)]
    if not shown:
        raise ValueError(f"{result}: no rows vllm_serving_SYSTEM_WORKLOAD_FIGURE; run the benchmark first")
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(len(shown), len(PANELS), figsize=(9, 2.5 * len(shown)), squeeze=False)
    for line, workload in zip(grid, shown, strict=True):
        for axes, (which, title) in zip(line, PANELS.items(), strict=True):
            there = [system for system in SYSTEMS if case(system, workload, which) in values]
            labels, colours = zip(*((SYSTEMS[system].label, SYSTEMS[system].colour) for system in there), strict=True)
            bars = axes.barh(labels, [values[case(system, workload, which)] for system in there], color=colours)
            axes.bar_label(bars, fmt="%.4g", padding=3)
            axes.set_title(f"{WORKLOADS[workload]}: {title}", fontsize=10)
            axes.margins(x=0.18)
            axes.invert_yaxis()
            if axes is not line[0]:
                axes.set_yticklabels([])
    _save(pyplot, figure, grid.flat, picture)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, all_axes: Any, picture: Path) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=160)
    pyplot.close(figure)
