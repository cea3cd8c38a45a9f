"""The commands `vcache segment`: lend memory to the pool, list it, take it back."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from vcache_backend import command, config, terminal
from vcache_backend.command import ConfigFile, Json, Socket
from vcache_backend.errors import ConfigError, SegmentError

if TYPE_CHECKING:
    from vcache_backend.metadata_server.client import Client
    from vcache_backend.metadata_server.messages import SegmentInfo
    from vcache_backend.vram_pool.devices import Device

NICENESS = 10
"""Niceness of `resize`, which moves chunks: on few processors requests come first."""
SPARE_BYTES = 2 << 30
"""GPU memory to be left free where the smaller segment is made before the old one goes."""

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
    as_json: Json = False,
) -> None:
    """Lend memory of a device, of an idle GPU for example. The server keeps it when this command
    ends.
    """
    from vcache_backend.status import plain
    from vcache_backend.vram_pool import devices, segment

    try:
        place = devices.resolve(device)
    except ConfigError as error:
        raise ConfigError(str(error).replace("pool.device:", "--device", 1)) from error
    # Pages are allocated on first write: without this check a lack of memory would hit whoever
    # writes there later.
    if place.medium == "host" and nbytes > (available := config.ByteSize(devices.host_available())):
        raise SegmentError(
            f"--bytes {nbytes}: {available.about} of host memory are available; lend less"
        )
    with command.client(config_file, socket) as client, segment.create(place, int(nbytes)) as owned:
        client.add_segment(owned.info, owned.fd)
        info = owned.info
    if as_json:
        return terminal.print_json(plain(info))
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
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long to wait for its last readers and writers."
        ),
    ] = 0.0,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Take a segment back. Its chunks are forgotten; its memory is free once nobody reads or writes
    it.
    """
    from vcache_backend.metadata_server.messages import SegmentId

    with command.client(config_file, socket) as client:
        dropped = client.drop_segment(SegmentId(segment))
        typer.echo(f"{segment}: {dropped.chunks:,} chunks forgotten")
        gone = dropped.gone or _waited(client, segment, time.monotonic() + wait) is None
    if not gone and wait:
        raise SegmentError(
            f"{segment} is still being read or written after {wait:g} s; it goes when that ends"
        )
    typer.echo(
        f"{segment}: gone" if gone else f"{segment}: goes when its last readers and writers end"
    )


@app.command("resize")
def resize_segment(
    segment: Annotated[
        str,
        typer.Argument(metavar="ID", help="The segment's id, as `vcache segment list` names it."),
    ],
    nbytes: Annotated[
        config.ByteSize,
        typer.Argument(
            metavar="SIZE", parser=command.nbytes_of, help="Its new size, such as `8GiB`."
        ),
    ],
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long to wait for its last readers and writers."
        ),
    ] = 60.0,
    config_file: ConfigFile = None,
    socket: Socket = None,
) -> None:
    """Take memory back from a segment while requests are served. Chunks that lie behind SIZE are
    moved to free room, or replace chunks that were used less recently. A segment on a GPU cannot
    shrink: all its chunks are moved, and a smaller one is lent in its place, before the move if the
    GPU has room for both."""
    from vcache_backend.metadata_server.messages import SegmentId
    from vcache_backend.metadata_server.moving import in_host_memory, move

    os.nice(NICENESS)
    with command.client(config_file, socket) as client:
        info, deadline = _waited(client, segment, 0.0), time.monotonic() + wait
        if info is not None and info.medium == "cuda":
            return typer.echo(replace(client, info, int(nbytes), deadline))
        before = client.stats().chunks
        client.resize_segment(SegmentId(segment), int(nbytes), keep=True)
        moved = move(client, SegmentId(segment), deadline, in_host_memory(client))
        client.resize_segment(SegmentId(segment), int(nbytes))
        info = _waited(client, segment, deadline, int(nbytes))
        after = client.stats().chunks
    if info is None:
        raise SegmentError(f"{segment} was dropped meanwhile")
    chunks = f"{moved:,} chunks moved, {max(before - after, 0):,} forgotten"
    if (left := info.nbytes - info.given_back - int(nbytes)) > 0:
        typer.echo(f"{segment}: {chunks}")
        raise SegmentError(
            f"{segment}: {config.ByteSize(left).about} are still being read or written; they are freed when that ends"
        )
    has = config.ByteSize(info.nbytes - info.given_back).about
    typer.echo(
        f"{segment}: {config.ByteSize(info.given_back).about} given back, {has} left, {chunks}"
    )


def _waited(client: Client, id_: str, deadline: float, nbytes: int = 0) -> SegmentInfo | None:
    """Wait until the segment has at most `nbytes` left, or until `deadline` (monotonic). Returns
    it, or None if it is gone.
    """
    while True:
        info = next((info for info in client.list_segments() if info.id == id_), None)
        if info is None or info.nbytes - info.given_back <= nbytes or time.monotonic() > deadline:
            return info
        time.sleep(0.05)


def replace(client: Client, info: SegmentInfo, nbytes: int, deadline: float) -> str:
    """Put a segment of `nbytes` in place of `info`, on the same GPU, and move the old one's chunks
    to where there is room.

    Returns the message for the user. deadline: monotonic. Raises SegmentError. If the old one was
    dropped before that, it goes all the same, but its memory is free only when all processes have
    unmapped it."""
    from contextlib import closing

    from vcache_backend.metadata_server.moving import move
    from vcache_backend.vram_pool import devices, segment

    if nbytes > info.nbytes:
        raise SegmentError(
            f"{info.id} has {info.nbytes:,} B; to lend more, use `vcache segment add`"
        )
    place, before = devices.resolve(info.device), client.stats().chunks
    new = (
        _lend(client, place, nbytes, 0.0)
        if devices.available(place) >= nbytes + SPARE_BYTES
        else None
    )
    with closing(segment.Mover(client.open_segment, place)) as mover:
        for other in client.list_segments():
            try:
                if (other.medium, other.state) == (info.medium, "live"):
                    mover.map(other.id)
            except SegmentError:
                client.avoid(other.id)
        client.drop_segment(info.id, keep=True)
        moved = move(client, info.id, deadline, mover.copy)
    if _waited(client, info.id, deadline) is not None:
        raise SegmentError(
            f"{info.id} goes when its last readers and writers end"
            + ("" if new else "; then lend less with `vcache segment add`")
        )
    chunks = f"{moved:,} chunks moved, {max(before - client.stats().chunks, 0):,} forgotten"
    new = new or _lend(client, place, nbytes, deadline)
    return (
        f"{info.id}: gone, {new.id} of {config.ByteSize(new.nbytes).about} in its place, {chunks}"
    )


def _lend(client: Client, place: Device, nbytes: int, deadline: float) -> SegmentInfo:
    """Lend `nbytes` of `place` as soon as it has room: others may still map what was dropped.
    Raises SegmentError after `deadline`.
    """
    from vcache_backend.vram_pool import segment

    while True:
        try:
            with segment.create(place, nbytes) as owned:
                client.add_segment(owned.info, owned.fd)
                return owned.info
        except SegmentError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
