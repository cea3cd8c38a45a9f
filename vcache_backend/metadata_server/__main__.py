"""`python -m vcache_backend.metadata_server [--config FILE] [--socket PATH]`, without the CLI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vcache_backend import config as configuration
from vcache_backend import log_format
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.server import serve


def main() -> int:
    """Serve until SIGTERM; 1 with one line on stderr if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m vcache_backend.metadata_server", description=__doc__
    )
    parser.add_argument("--config", help="YAML configuration file (default: $VCACHE_CONFIG)")
    parser.add_argument("--socket", help="path of the Unix socket (overrides server.socket)")
    parser.add_argument("--log", type=Path, help="a log of bounded size in place of stderr")
    arguments = parser.parse_args()
    try:
        loaded = configuration.load(arguments.config)
        if arguments.socket:
            loaded = configuration.with_socket(loaded, arguments.socket, "--socket")
        log_format.begin(arguments.log)
        serve(loaded.server)
    except VCacheError as error:
        sys.stderr.write(f"vcache server: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
