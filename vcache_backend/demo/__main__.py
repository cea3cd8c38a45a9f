"""`python -m vcache_backend.demo [--requests N] [--json] [--corrupt N]`: the demo without the rest of the CLI, for tests."""

from __future__ import annotations

import argparse
import sys

from vcache_backend.config import load
from vcache_backend.demo import run
from vcache_backend.errors import VCacheError


def main() -> int:
    """The demo's exit code; 1 with one line on stderr if it cannot run, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m vcache_backend.demo")
    parser.add_argument("--config", help="YAML configuration file")
    parser.add_argument("--requests", type=int, help="only the first N requests of the excerpt")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--corrupt", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        return run(load(arguments.config), requests=arguments.requests, as_json=arguments.json, corrupt=arguments.corrupt)
    except VCacheError as error:
        sys.stderr.write(f"vcache demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
