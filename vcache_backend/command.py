"""What all commands of `vcache` have: their options, a connection, and one line on stderr for an error of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from vcache_backend import config
from vcache_backend.errors import ServerUnavailable, VCacheError

if TYPE_CHECKING:
    from vcache_backend.metadata_server.client import Client

ConfigFile = Annotated[
    Path | None,
    # Whether it can be read, reading it tells, in one line.
    typer.Option(
        "--config", "-c", metavar="PATH", readable=False, help="YAML file; without it VCACHE_CONFIG, without that the defaults."
    ),
]
Socket = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="The server's socket, whatever the file says.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

EXIT_CODES = "Exit codes: 0 done; 1 it failed, and one line on stderr, or a finding, says why; 2 wrong usage."
ENGINE = ("torch", "numpy", "triton")
"""What the base install does not bring."""


class _Group(TyperGroup):
    """Turns our errors into one line, and what the base install lacks."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for one in self.commands.values():
            one.help = " ".join((one.help or "").split())  # in a list of commands lines would end where they do in the source

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VCacheError as error:
            trouble: Exception = error
            line = str(error)
        except ModuleNotFoundError as error:
            if error.name not in ENGINE:
                raise
            trouble, line = error, f"this needs {error.name}, of the extra `engine`: pip install '/path/to/vcache[engine]'"
        typer.secho(f"vcache: {line}", fg="red", err=True)
        raise typer.Exit(1) from trouble


def group(text: str, root: bool = False) -> typer.Typer:
    """Commands that belong together; `root`: all of them."""
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=root,
        epilog=EXIT_CODES if root else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def load(path: Path | None, socket: Path | None) -> config.Config:
    """What is in force for one command. A `socket` of the command line is meant from the folder that it is typed in."""
    loaded = config.load(path)
    return loaded if socket is None else config.with_socket(loaded, str(socket.absolute()), "--socket")


def client(path: Path | None, socket: Path | None, reconnect: bool = False) -> Client:
    """A connection for one command, on which every call may take `client.control_seconds`: people can wait, and what began is finished
    on a machine that is busy. Raises ServerUnavailable, with the reason, if there is none."""
    from vcache_backend.metadata_server.client import Client

    loaded = load(path, socket)
    waits = max(loaded.client.control_seconds, loaded.client.request_seconds)
    patient = msgspec.structs.replace(loaded.client, connect_seconds=waits, request_seconds=waits)
    made = Client(loaded.server.path, patient, reconnect=reconnect)
    if not made.connected:
        made.close()
        raise ServerUnavailable(made.trouble)
    return made


def nbytes_of(text: str | config.ByteSize) -> config.ByteSize:
    """Also of an option's default, which comes by here, too."""
    try:
        nbytes = config.ByteSize.parse(int(text) if isinstance(text, str) and text.isdecimal() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes <= 0:
        raise typer.BadParameter("Expected more than 0 bytes")
    return nbytes
