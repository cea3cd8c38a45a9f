"""The commands `vcache segment`: lend memory to the pool, list it, take it back."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vcache_backend import config
from vcache_backend.cli import command, terminal
from vcache_backend.cli.command import ConfigFile, Json, Socket
from vcache_backend.errors import ConfigError, SegmentError

app = command.group("Lend memory to the pool, list it, take it back.")


@app.command("add")
def add_segment(
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="`cuda:N`, a GPU's UUID, `host` or `host:NAME`.")
    ],
    nbytes: Annotated[
        config.ByteSize,
        typer.Option(
            "--bytes", metavar="SIZE", parser=command.nbytes_of, help="For example `64GiB`."
        ),
    ],
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Lend memory of a device, such as an idle GPU. The server keeps it when this command ends."""
    from vcache_backend.vram_pool import devices, regions

    try:
        place = devices.resolve(device)
    except ConfigError as error:
        raise ConfigError(str(error).replace("pool.device:", "--device", 1)) from error
    # Pages are allocated on first write: without this check a lack of memory would hit a later
    # writer.
    if place.medium == "host" and nbytes > (available := config.ByteSize(devices.host_available())):
        raise SegmentError(
            f"--bytes {nbytes}: {available.about} of host memory are free; lend less"
        )
    with command.client(config_file, socket) as client, regions.create(place, int(nbytes)) as owned:
        os.close(client.add_segment(owned.info, owned.fd)[1])
        info = owned.info
    typer.echo(f"{info.id}: {config.ByteSize(info.nbytes).about} of {info.device} lent")


@app.command("list")
def list_segments(
    config_file: ConfigFile = None, socket: Socket = None, as_json: Json = False
) -> None:
    """List the segments of the pool."""
    from vcache_backend.status import plain, segments_table

    with command.client(config_file, socket) as client:
        segments = client.list_segments()
    return (
        terminal.print_json(plain(segments)) if as_json else terminal.show(segments_table(segments))
    )


@app.command("drop")
def drop_segment(
    segment: Annotated[
        str,
        typer.Argument(metavar="ID", help="The segment's id, as `vcache segment list` names it."),
    ],
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Take a segment back. Its chunks are forgotten. Its memory is freed once nobody uses it."""
    from vcache_backend.protocol.messages import SegmentId

    with command.client(config_file, socket) as client:
        dropped = client.drop_segment(SegmentId(segment))
        typer.echo(f"{segment}: {dropped.chunks:,} chunks forgotten")
    goes = "gone" if dropped.gone else "goes when its last readers and writers end"
    typer.echo(f"{segment}: {goes}")
