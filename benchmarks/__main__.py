"""`python -m benchmarks`, or `vcache bench`: run the subjects this machine can run, print a table, write one result file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from . import both_ways, codecs, copies, engine, metadata, mooncake, mooncake_depot, turns
from .results import Row, document, write

TABLE_COLUMNS = 110
SUBJECTS: dict[str, Callable[[], list[Row]]] = {
    "metadata": metadata.run,
    "turns": turns.run,
    "copies": copies.run,
    "both_ways": both_ways.run,
    "engine": engine.run,
    "codecs": codecs.run,
    "mooncake": mooncake.run,
}
ON_REQUEST = ("mooncake",)
"""Subjects that run only where `--only` names them: they take long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See `vcache bench --help`. 1 if a case missed its floor."""
    parser = argparse.ArgumentParser(prog="vcache bench", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=[*SUBJECTS], help="run this subject (may be repeated; default: all quick ones)"
    )
    parser.add_argument("--out", type=Path, help="result file, such as benchmarks/results/NAME.json")
    parser.add_argument("--json", action="store_true", help="print the result file instead of a table")
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in options.only or SUBJECTS:
        why = _why_not(name, bool(options.only))
        if why:
            console.print(f"{name}: skipped, {why}")
            continue
        with console.status(f"measuring {name} ..."):
            rows += SUBJECTS[name]()
    result = document(rows, options.commit)
    if options.out:
        write(options.out, result)
        console.print(f"written to {options.out}")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        wide = Console()
        wide.width = max(wide.width, TABLE_COLUMNS)  # rather long lines than cut figures
        wide.print(_table(rows))
    return 0 if all(row.ok is not False for row in rows) else 1


def _why_not(name: str, asked: bool) -> str:
    """Why a subject is not run here; empty if it is."""
    if name == "copies" and not _has_gpu():
        return "no GPU here"
    if name in ON_REQUEST and not asked:
        return f"it takes long: --only {name}"
    return mooncake_depot.missing() if name == "mooncake" else ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("case", "value", "reference", "unit", "ratio", "floor", "runs", "spread", ""):
        table.add_column(column, justify="left" if column in ("case", "unit", "floor", "") else "right", no_wrap=True)
    for row in rows:
        verdict = {True: "[green]ok[/]", False: "[bold red]missed[/]", None: ""}[row.ok]
        figures = (f"{row.value:,.4g}", f"{row.reference:,.4g}", row.unit, f"{row.ratio:.3f}", row.limit)
        table.add_row(row.case, *figures, str(row.runs), f"{row.spread:.1%}", verdict)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
