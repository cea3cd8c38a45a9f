"""Show a metadata server's metrics over HTTP: `python -m vcache_backend.monitor --socket PATH
--listen HOST:PORT`.

The server starts it if `server.metrics` is set. It ends when its standard input ends, and so with
the server."""

from __future__ import annotations

import argparse
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


def main() -> int:
    """Serve until standard input ends, or Ctrl-C. Returns the exit code: 1 if it cannot listen."""
    parser = argparse.ArgumentParser(prog="python -m vcache_backend.monitor", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="the metadata server's socket")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--hosts", default="", help="its names, with commas between them")
    arguments = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_format.begin()
    samples = Samples(arguments.socket)
    registry = CollectorRegistry()
    registry.register(ServerMetrics(samples))
    try:
        host, port = split_address(arguments.listen, "--listen")
        web = Web(host, port, samples, registry, arguments.hosts.split(","))
    except (OSError, ValueError) as error:
        log.error("server.metrics: cannot listen at %s: %s", arguments.listen, error)
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
    sys.exit(main())
