"""The program `vcache`, also as `python -m vcache_backend`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run a command. Until the command says otherwise, Ctrl-C ends the program at once: Python's
    own handler raises within whatever is being imported, and that may lose the exception."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vcache_backend import cli

    cli.main()


if __name__ == "__main__":
    main()
