"""Throughput and time to first token of each system, drawn from a result file. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from ..vllm.report import read
from .summary import case
from .systems import SYSTEMS

TITLES = {"prefix": "prefix repetition", "trace": "conversation trace"}
PANELS = {"requests_per_second": "requests a second", "ttft_p50": "median time to first token, ms"}


def plot(result: Path, picture: Path) -> None:
    """Bars for each workload into `picture` (`.svg` or `.png`). Raises ValueError if the file has no such rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {row.case: row.value for row in read(result)}
    shown = [name for name in TITLES if any(case(system, name, figure) in values for system in SYSTEMS for figure in PANELS)]
    if not shown:
        raise ValueError(f"{result}: no rows vllm_serving_SYSTEM_WORKLOAD_FIGURE; run the benchmark first")
    figure, grid = pyplot.subplots(len(shown), len(PANELS), figsize=(9, 2.5 * len(shown)), squeeze=False)
    for line, workload in zip(grid, shown, strict=True):
        for axes, (which, title) in zip(line, PANELS.items(), strict=True):
            there = [system for system in SYSTEMS if case(system, workload, which) in values]
            bars = axes.barh(
                [SYSTEMS[system].label for system in there],
                [values[case(system, workload, which)] for system in there],
                color=[SYSTEMS[system].colour for system in there],
            )
            axes.bar_label(bars, fmt="%.4g", padding=3)
            axes.set_title(f"{TITLES[workload]}: {title}", fontsize=10)
            axes.margins(x=0.18)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
            if axes is not line[0]:
                axes.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(picture, dpi=160)
    pyplot.close(figure)
