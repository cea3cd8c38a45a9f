"""`vcache top`: the status of a server, live."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque

from rich.console import Group
from rich.live import Live
from rich.text import Text

from vcache_backend import tables
from vcache_backend.errors import ConfigError, VCacheError, printable
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ServerStats


def run(client: Client) -> None:
    """Show the status each second, until SIGINT or SIGTERM. For the main thread. Goes on while the
    server is away. Raises ConfigError if stdout is no terminal."""
    if not sys.stdout.isatty():
        raise ConfigError("vcache top needs a terminal; `vcache status` prints the status once")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    minute = deque[ServerStats](maxlen=61)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(client, minute), refresh=True)
            time.sleep(1)


def _picture(client: Client, minute: deque[ServerStats]) -> Group:
    """Ask the server once. minute: its statistics of the last minute, the oldest first."""
    try:
        stats = client.stats()
    except VCacheError as error:
        minute.clear()
        return Group(Text(printable(str(error)), "bold red"))
    if minute and stats.uptime_seconds < minute[-1].uptime_seconds:  # another server
        minute.clear()
    minute.append(stats)
    return Group(*tables.status(stats, minute[0]))


def _end(number: int, frame: object) -> None:
    """Leave `run`, which gives the terminal back."""
    raise SystemExit(0)
