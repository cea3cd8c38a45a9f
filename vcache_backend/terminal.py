"""What `vcache` writes to a terminal, a file or another program: tables, JSON, and what becomes of it where that cannot show or take it."""

from __future__ import annotations

import codecs
import errno
import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN = {"█": "#", "·": ".", "–": "-", "µ": "u", "…": "~", "→": ">"} | dict.fromkeys("▏▎▍▌▋▊▉", "+")


@contextmanager
def whatever_it_shows() -> Iterator[None]:
    """Within it a terminal that has ASCII only gets that; what cannot be written ends the program with one line."""
    codecs.register_error("plain", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="plain")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again at the end
        sys.exit(f"vcache: {error}")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """What a terminal that has ASCII only shows of our bars and dashes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def show(what: RenderableType, anew: bool = False) -> None:
    """Print a table or the like. anew: in place of what the terminal shows, its beginning where it is too long for that."""
    from rich.console import Console

    # Piped, a table keeps its columns rather than being folded at 80.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if not anew or not console.is_terminal:
        console.print(what)
        return
    with console.capture() as picture:
        console.print(what)
    lines, most = picture.get().splitlines(), max(2, (os.get_terminal_size(1).lines or 24) - 1)
    if len(lines) > most:
        lines[most - 1 :] = [f"… {len(lines) - most + 1} lines more: a taller window, or without --watch"]
    console.clear()
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def print_json(value: Any, indent: int | None = 2) -> None:
    """For people's scripts."""
    typer.echo(json.dumps(value, indent=indent))


def pause(seconds: float) -> None:
    """Wait, but not for who reads from us and has ended."""
    reader = select.poll()
    reader.register(1, 0)
    if reader.poll(seconds * 1000):
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more")
