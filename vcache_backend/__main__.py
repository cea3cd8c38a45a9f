"""The program `vcache`, also as `python -m vcache_backend`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run a command. Until the command sets a handler, Ctrl-C ends the program at once: Python's
    handler would raise within an import, which may lose the exception."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vcache_backend import cli

    cli.main()


if __name__ == "__main__":
    main()
