"""Makes docs/vllm-throughput.svg from its result file: `.venv/bin/python scripts/plots.py [FOLDER]`
(docs).
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks come with the repository, and are not installed

from benchmarks.results import read  # noqa: E402
from benchmarks.serving.summary import case  # noqa: E402
from benchmarks.serving.systems import SYSTEMS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COLOURS = {
    "alone": "#8a8a8a",
    "offload": "#3a8f4d",
    "mp": "#c1762b",
    "vcache": "#1f6fb4",
    "inplace": "#123f75",
}
WORKLOADS = {"prefix": "prefix repetition", "trace": "conversation trace"}
PANELS = {"requests_per_second": "requests/s", "ttft_p50": "median TTFT, ms"}


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
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "vcache"
    serving(RESULTS / "h200x4-inplace-2026-11-22.json", folder / "vllm-throughput.svg")


if __name__ == "__main__":
    main()
