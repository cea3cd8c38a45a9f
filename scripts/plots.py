"""Makes docs/vllm-throughput.svg from result files: `.venv/bin/python scripts/plots.py [FOLDER]`
(docs)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks come with the repository, and are not installed

from benchmarks.serving.summary import case  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ROUTED = RESULTS / "two-servers.json", "3eedbfe9"
LMCACHE = RESULTS / "two-servers.json", "d7a166a0"
RANKS = RESULTS / "ranks.json", "5a3c6805"
"""A file, and the commit of one of its runs."""
ARMS = {
    "alone_turn": ("vLLM, in turn", "#b0b0b0"),
    "alone_cache_aware16": ("vLLM behind vllm-router, 16", "#6f6f6f"),
    "alone_cache_aware64": ("vLLM behind vllm-router, 64", "#4a4a4a"),
    "mp_turn": ("LMCache's server, in turn", "#c98a3a"),
    "inplace_turn": ("vcache, in turn", "#1f6fb4"),
    "inplace_cache_aware64": ("vcache behind vllm-router, 64", "#123f75"),
    "alone_dp_turn": ("vLLM, data parallel", "#b0b0b0"),
    "inplace_dp_turn": ("vcache, data parallel", "#1f6fb4"),
}
LINES = [
    ("fork", (LMCACHE, ROUTED), "one 32k context, 48 requests"),
    ("prefix", (ROUTED,), "repeated prefixes"),
    ("trace", (LMCACHE, ROUTED), "conversations of a trace"),
    ("prefix", (RANKS,), "prefixes, one vllm serve"),
]
"""Workload, runs, and what a panel is called. A row of a later run replaces that of an earlier
one."""
PANELS = {"requests_per_second": "requests/s", "ttft_p50": "median TTFT, ms"}


def rows(file: Path, commit: str) -> dict[str, float]:
    """The values of a run by their names."""
    (run,) = [run for run in json.loads(file.read_text()) if run["commit"] == commit]
    return {row["case"]: row["value"] for row in run["rows"]}


def serving(picture: Path) -> None:
    """Throughput and time to first token of each arm: a line a workload."""
    every = [dict(each for run in line[1] for each in rows(*run).items()) for line in LINES]
    arms = [
        [arm for arm in ARMS if case(arm, line[0], "requests_per_second") in values]
        for line, values in zip(LINES, every, strict=True)
    ]
    figure, grid = pyplot.subplots(
        len(LINES),
        len(PANELS),
        figsize=(9.5, 7.5),
        layout="constrained",
        height_ratios=[len(line) + 1 for line in arms],
    )
    for line, (workload, _, name), values, shown in zip(grid, LINES, every, arms, strict=True):
        for axes, (which, title) in zip(line, PANELS.items(), strict=True):
            bars = axes.barh(
                [ARMS[arm][0] for arm in shown],
                [values[case(arm, workload, which)] for arm in shown],
                color=[ARMS[arm][1] for arm in shown],
            )
            axes.bar_label(bars, fmt="%.4g", padding=3)
            axes.set_title(f"{name}: {title}", fontsize=10)
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
    serving(folder / "vllm-throughput.svg")


if __name__ == "__main__":
    main()
