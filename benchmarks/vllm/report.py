"""The result file of a run, written again after every part, and the run's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..results import Row, document, spread, write


class OutOfTime(RuntimeError):
    """The run's deadline has come."""


class Clock:
    """Seconds of a run."""

    def __init__(self, seconds: float) -> None:
        self._started, self._seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        return self._seconds - self.spent

    def check(self, needed: float = 0.0) -> None:
        """OutOfTime unless so many seconds are left."""
        if self.left < needed:
            raise OutOfTime(f"{self.spent:.0f} s spent, {self.left:.0f} s left")


class Report:
    """Rows by case, in the order they came; a file that is there already is continued, and a case measured again is replaced."""

    def __init__(self, path: Path | None, commit: str, suffix: str = "") -> None:
        self._path, self._commit, self._suffix = path, commit, suffix
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            self.rows = {row.case: row for row in read(path)}

    def add(self, rows: Sequence[Row]) -> None:
        """Print them and write the file."""
        for row in [msgspec.structs.replace(row, case=row.case + self._suffix) for row in rows]:
            self.rows[row.case] = row
            print("  " + line(row), flush=True)
        if self._path is not None:
            write(self._path, document(list(self.rows.values()), self._commit))

    def table(self) -> str:
        """All rows, for people."""
        return "\n".join(line(row) for row in self.rows.values())


def line(row: Row) -> str:
    """One row of a table."""
    verdict = {True: "ok", False: "MISSED", None: ""}[row.ok]
    figures = f"{row.value:12.4f} {row.reference:12.4f} {row.unit:9} ratio {row.ratio:8.4f}"
    return f"{row.case:36} {figures} {row.limit:8} {verdict:6} runs {row.runs:5} spread {row.spread:.1%}"


def read(path: Path) -> list[Row]:
    """The rows of a result file."""
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["rows"], list[Row])


def recorded(case: str, unit: str, samples: Sequence[float], reference: float, what: str) -> Row:
    """A row without a limit: median of `samples` beside `reference`."""
    value = statistics.median(samples)
    return Row(case, value, unit, reference, value / reference if reference else 0.0, len(samples), spread(samples), what)


def fraction(case: str, good: Sequence[bool], what: str, limited: bool = True) -> Row:
    """How many of the prompts are as they should be; all of them must."""
    share = sum(good) / len(good) if good else 0.0
    limit, ok = (">= 1", bool(good) and all(good)) if limited else ("", None)
    return Row(case, share, "fraction", 1.0, share, len(good), 0.0, what, limit, ok)
