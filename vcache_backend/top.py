"""`vcache top`: the status of a server, live."""

from __future__ import annotations

import signal
import sys
import time

from rich.console import Group
from rich.live import Live
from rich.text import Text

from vcache_backend import tables
from vcache_backend.errors import ConfigError, VCacheError, printable
from vcache_backend.protocol.client import Client


def run(client: Client) -> None:
    """Show the status each second, until SIGINT or SIGTERM. For the main thread. Goes on while the
    server is away. Raises ConfigError if stdout is no terminal."""
    if not sys.stdout.isatty():
        raise ConfigError("vcache top needs a terminal; `vcache status` prints the status once")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(client), refresh=True)
            time.sleep(1)


def _picture(client: Client) -> Group:
    """Ask the server once."""
    try:
        return Group(*tables.status(client.stats()))
    except VCacheError as error:
        return Group(Text(printable(str(error)), "bold red"))


def _end(number: int, frame: object) -> None:
    """Leave `run`, which gives the terminal back."""
    raise SystemExit(0)
