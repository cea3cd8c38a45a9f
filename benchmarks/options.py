"""What the measurements of vLLM have in common on their command lines, and when they end."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from .results import Clock, Row, line, read, write


class Measurement:
    """A measurement that runs: its time, its rows by case, the folder of its logs. Parts that fail
    cost no other part's rows. SIGTERM, and the deadline with a reserve, become an exception, so
    that children are killed on the way out."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: of `parser`. Continues a file that is there; a case that is measured again is
        replaced."""
        self._path, self._commit, self._failed = options.out, options.commit, list[str]()
        self.rows, self.clock = dict[str, Row](), Clock(options.seconds)
        if self._path is not None:
            if self._path.exists():
                self.rows = {row.case: row for row in read(self._path)}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.with_suffix(".new").write_bytes(b"")  # fail now, not after the measurements
            self._path.with_suffix(".new").unlink()
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, _end)
        # What still runs by then is ended. The rows so far are kept.
        signal.alarm(int(options.seconds) + 20)
        self.folder: Path = options.logs or Path(tempfile.mkdtemp(prefix="vcache-logs-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"logs in {self.folder}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part: if it raises, say so, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other parts' rows count
            self._failed.append(name)
            traceback.print_exc()
            said = f"FAILED after {self.clock.spent:.0f} s: {type(error).__name__}: {error}"
            print(f"{name}: {said}", flush=True)

    def add(self, rows: Iterable[Row]) -> None:
        """Print each as it comes, and write the file."""
        for row in rows:
            self.rows[row.case] = row
            print("  " + line(row), flush=True)
            if self._path is not None:
                write(self._path, list(self.rows.values()), self._commit)

    def end(self) -> int:
        """1 if a row missed its limit or a part failed."""
        signal.alarm(0)
        failed = f"; failed: {', '.join(self._failed)}" if self._failed else ""
        print(f"{self.clock.spent:.0f} s; {len(self.rows)} rows{failed}", flush=True)
        return int(bool(failed) or any(row.ok is False for row in self.rows.values()))


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(
                f"no {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return names

    return parse


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.removeprefix("vcache.").partition("=")
    return name, value


def parser(name: str, text: str | None, seconds: float) -> argparse.ArgumentParser:
    """A parser with the options that all measurements of vLLM have."""
    made = argparse.ArgumentParser(
        prog=name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = made.add_argument
    option("--out", type=Path, help="result file; one that is there is continued")
    option("--seconds", type=float, default=seconds, help="when to stop (default: %(default)g)")
    option("--commit", default="", help="the commit measured, where git cannot tell")
    option("--set", type=_setting, action="append", default=[], help="SECTION.KEY=VALUE of vcache")
    option("--logs", type=Path, help="where logs and settings go; default: a new folder")
    option(
        "--cache",
        type=Path,
        default=Path("/tmp/vcache-vllm-cache"),
        help="vLLM's compiled code and the models, for the next run",
    )
    return made
