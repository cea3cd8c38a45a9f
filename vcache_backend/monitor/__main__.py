"""Show a metadata server's metrics over HTTP: `python -m vcache_backend.monitor SOCKET HOST:PORT
[NAME...]`, with further names by which clients may reach it.

The server starts it if `server.metrics` is set. It ends when its standard input ends, and so with
the server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from vcache_backend import log_format
from vcache_backend.config import split_address
from vcache_backend.monitor.metrics import ServerMetrics
from vcache_backend.monitor.samples import Samples
from vcache_backend.monitor.web import Web

log = logging.getLogger("vcache_backend.monitor")


def main(path: str, listen: str, *names: str) -> int:
    """Serve until standard input ends, or Ctrl-C. Returns the exit code: 1 if it cannot listen."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_format.begin()
    samples = Samples(Path(path))
    registry = CollectorRegistry()
    registry.register(ServerMetrics(samples))
    try:
        web = Web(*split_address(listen, "metrics"), samples, registry, names)
    except (OSError, ValueError) as error:  # ValueError: no name of a host
        log.error("server.metrics: cannot listen at %s: %s", listen, error)
        return 1
    log.info("metrics and a page at http://%s", web.address)
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(web))
    return 0


async def _serve(web: Web) -> None:
    serving = asyncio.create_task(web.serve())
    asyncio.get_running_loop().add_reader(0, lambda: os.read(0, 4096) or serving.cancel())
    await serving


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
