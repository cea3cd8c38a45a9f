"""Writes the output of `vcache`, tables and JSON, to a terminal, a file or a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

LEAST_COLUMNS = 80
"""Every table fits into 80 columns. A narrower terminal folds lines."""


@contextmanager
def whatever_it_shows() -> Iterator[None]:
    """Within the block, a sign that the output's encoding lacks becomes a question mark, and an
    OSError, such as a full disk or a closed pipe, ends the program with one line. Output to a
    closed stream is dropped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # A file that is opened later must not take the stream's number, either.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the program ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        # at exit Python writes its buffer's rest, and would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(f"vcache: {error}")


def show(what: RenderableType) -> None:
    from rich.console import Console

    # Piped, a table keeps its columns rather than being folded at 80.
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False)
    # rich leaves out a column without room.
    console.width = max(console.width, LEAST_COLUMNS)
    console.print(what)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
