"""The common parts of commands: options, configuration, connection, and error lines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from vcache_backend import config
from vcache_backend.errors import (
    MAX_LINE_CHARS,
    ConfigError,
    ServerUnavailable,
    VCacheError,
    printable,
)

if TYPE_CHECKING:
    from vcache_backend.protocol.client import Client


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, **more)


_FILE = "YAML file. Without it: the one that VCACHE_CONFIG names, or the defaults."
# readable=False: reading it raises an error of one line.
ConfigFile = Annotated[Path | None, option("PATH", _FILE, "--config", "-c", readable=False)]
_SOCKET = "The server's socket, in place of the configured one."
Socket = Annotated[Path | None, option("PATH", _SOCKET, "--socket")]
Json = Annotated[bool, option(None, "Print JSON instead of tables.", "--json")]
_EXIT_CODES = "Exit codes: 0 success; 1 failure, and why; 2 wrong usage."


class _Group(TyperGroup):
    """Commands that end with one line on stderr, and exit code 1, if a VCacheError is raised or a
    module is missing that the base install lacks."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for subcommand in self.commands.values():
            first = " ".join((subcommand.help or "").split()).partition(". ")[0]
            subcommand.short_help = first.removesuffix(".")  # else the list of commands cuts it off

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VCacheError as error:
            line = str(error)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy", "triton"):
                raise
            line = f"{error.name} is not installed: pip install '/path/to/vcache[engine]'"
        typer.secho(f"vcache: {printable(line, MAX_LINE_CHARS)}", fg="red", err=True)
        raise typer.Exit(1)


def group(text: str, root: bool = False) -> typer.Typer:
    """An empty group of commands. text: the help. root: with completion and exit codes."""
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=root,
        epilog=_EXIT_CODES if root else None,
        pretty_exceptions_enable=False,
        # rich's boxes show `<bool>` behind flags, and squeeze texts beside wide columns
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def load(path: Path | None, socket: Path | None) -> config.Config:
    """The configuration of file `path`, with `socket` in place of `server.socket`; either may be
    None. A relative socket starts at the working folder. Raises ConfigError."""
    loaded = config.load(path)
    if socket is None:
        return loaded
    if not socket.name:
        given = "" if socket == Path() else str(socket)
        raise ConfigError(f"--socket: socket must be the path of a file, got {given!r}")
    return config.with_socket(loaded, str(socket.absolute()), "--socket")


def client(path: Path | None, socket: Path | None, reconnect: bool = False) -> Client:
    """Connect to the server, for one command. reconnect: again, whenever the connection is lost.
    Raises ServerUnavailable with the reason.

    Every call may take `client.control_seconds`: people can wait, and a busy machine should not end
    a command early."""
    from vcache_backend.protocol.client import Client

    loaded = load(path, socket)
    waits = max(loaded.client.control_seconds, loaded.client.request_seconds)
    patient = msgspec.structs.replace(loaded.client, connect_seconds=waits, request_seconds=waits)
    made = Client(loaded.server.path, patient, reconnect=reconnect)
    if not made.connected:
        made.close()
        raise ServerUnavailable(made.trouble)
    return made


def clean_up_if_ended() -> None:
    """From now on Ctrl-C and SIGTERM raise KeyboardInterrupt: exit code 130."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def nbytes_of(text: str | config.ByteSize) -> config.ByteSize:
    """An option's value in bytes. Typer passes the default, too. Raises BadParameter."""
    try:
        nbytes = config.ByteSize.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes <= 0:
        raise typer.BadParameter("Expected more than 0 bytes")
    return nbytes
