"""`python -m vcache_backend.metadata_server [--config FILE] [--socket PATH]`: the server without the CLI's dependencies."""

from __future__ import annotations

import argparse
import sys

import msgspec

from vcache_backend import config as configuration
from vcache_backend import log_format
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.server import serve


def main() -> int:
    """Serve until SIGTERM; 1 with one line on stderr if that is impossible."""
    parser = argparse.ArgumentParser(prog="python -m vcache_backend.metadata_server", description=__doc__)
    parser.add_argument("--config", help="YAML configuration file (default: $VCACHE_CONFIG, else the defaults)")
    parser.add_argument("--socket", help="path of the Unix socket (overrides server.socket)")
    arguments = parser.parse_args()
    try:
        server = configuration.load(arguments.config).server
        if arguments.socket:
            server = msgspec.structs.replace(server, socket=arguments.socket)
        log_format.begin(server.log_format)
        serve(server)
    except VCacheError as error:
        sys.stderr.write(f"vcache server: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
