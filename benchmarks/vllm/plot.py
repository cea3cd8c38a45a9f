"""TTFT against prompt length, drawn from a result file. Needs matplotlib."""

from __future__ import annotations

import re
from pathlib import Path

from .report import read

SERIES = {
    "recompute": ("recomputed", "#8a8a8a", "o"),
    "mp": ("LMCache MP server, host memory", "#c1762b", "s"),
    "lmcache": ("vcache through LMCache, hit on the other GPU", "#7f5fb0", "v"),
    "vcache": ("vcache, hit on the other GPU", "#1f6fb4", "D"),
    "prefix": ("vLLM's own prefix cache", "#3a8f4d", "^"),
}


def plot(result: Path, picture: Path) -> None:
    """A log-log chart into `picture` (`.svg` or `.png`), of our own connector's rows where the file has them, else of LMCache's.

    Raises ValueError if the file has no such rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: dict[str, list[tuple[int, float]]] = {}
    rows = read(result)
    door = "vllm" if any(row.case.startswith("vllm_prefix_ms_") for row in rows) else "lmcache"
    for row in rows:
        match = re.fullmatch(door + r"_(\w+?)_ms_\w+", row.case)
        if match and match[1] in SERIES and (length := re.search(r"TTFT of (\d+) tokens", row.what)):
            points.setdefault(match[1], []).append((int(length[1]), row.value))
    if not points:
        raise ValueError(f"{result}: no rows DOOR_VARIANT_ms_LENGTH; run the part `ttft` first")
    figure, axes = pyplot.subplots(figsize=(7, 4.3))
    for name, (label, colour, marker) in SERIES.items():
        if name in points:
            lengths, values = zip(*sorted(points[name]), strict=True)
            axes.plot(lengths, values, color=colour, marker=marker, label=label, linewidth=1.8, markersize=5)
            axes.annotate(
                f"{values[-1]:,.0f}" if values[-1] >= 100 else f"{values[-1]:.3g}",
                (lengths[-1], values[-1]),
                textcoords="offset points",
                xytext=(7, -3),
                color=colour,
            )
    axes.set(xscale="log", yscale="log", xlabel="prompt length, tokens", ylabel="time to first token, ms")
    ticks = sorted({length for series in points.values() for length, _ in series})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=160)
    pyplot.close(figure)
