"""What the measurements of vLLM have in common on their command lines, and when they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

GRACE = 20
"""Seconds after the deadline at which whatever still runs is ended. The rows so far are kept."""


def end_in_time(seconds: float) -> None:
    """SIGTERM, and the deadline with a reserve, become an exception, so that children are killed on
    the way out.
    """

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    signal.alarm(int(seconds) + GRACE)


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
