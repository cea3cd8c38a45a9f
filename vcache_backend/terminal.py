"""Writes the output of `vcache`, tables and JSON, to a terminal, a file or a pipe."""

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
"""What stands for our signs where the encoding does not have them."""


@contextmanager
def whatever_it_shows() -> Iterator[None]:
    """Within the block, signs that the output's encoding does not have become those of `PLAIN`, and
    an OSError, such as a full disk or a closed pipe, ends the program with one line."""
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
        # at exit Python writes its buffer's rest, and would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(f"vcache: {error}")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """The error handler `plain` of codecs: what stands for characters that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(
        PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]
    ), error.end


def show(what: RenderableType, anew: bool = False) -> None:
    """Print a table or the like. anew: clear the terminal before, and cut what is longer than
    it.
    """
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
        lines[most - 1 :] = [
            f"… {len(lines) - most + 1} lines more: a taller window, or without --watch"
        ]
    console.clear()
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print `value` as JSON. indent: None for one line."""
    typer.echo(json.dumps(value, indent=indent))


def pause(seconds: float) -> None:
    """Wait for `seconds`. Raises BrokenPipeError as soon as nobody reads our output any more."""
    reader = select.poll()
    reader.register(1, 0)
    if reader.poll(seconds * 1000):
        raise BrokenPipeError(errno.EPIPE, "the program that read the output has ended")
