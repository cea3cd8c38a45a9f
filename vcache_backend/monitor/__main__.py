"""Show a metadata server's metrics over HTTP: `python -m vcache_backend.monitor SOCKET HOST:PORT`.

The server starts this process if `server.metrics` is set. The process ends with its standard input,
and so with the server."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from vcache_backend import log_format
from vcache_backend.monitor.web import Samples, Web

log = logging.getLogger("vcache_backend.monitor")


def main(path: str, listen: str) -> int:
    """Serve until standard input ends, or Ctrl-C. Returns the exit code: 1 if listening fails."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_format.begin()
    try:
        web = Web(listen, Samples(Path(path)))
    except (OSError, ValueError) as error:
        log.error("server.metrics: cannot listen at %s: %s", listen, error)
        return 1
    log.info("metrics and a page at http://%s", web.address)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    with suppress(KeyboardInterrupt):
        while os.read(0, 4096):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
