"""Copies chunks out of memory that is to be given back, for `vcache segment resize`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import Location, SegmentId

_PAUSE_SECONDS = 0.01


Copy = Callable[[Sequence[tuple[Location, Location]]], None]
"""Copies from the first location of each pair to the second. Returns when all of it is there."""


def move(client: Client, id_: SegmentId, deadline: float, copy: Copy) -> int:
    """Copy what a resize or a drop keeps to where the server says, until nothing is left or
    `deadline` (monotonic).

    Returns how many chunks moved. A chunk stays where it was until the server knows that its copy
    is complete."""
    moved = 0
    while time.monotonic() < deadline:
        moves = client.move(id_)
        if moves.pairs:
            copy(moves.pairs)
            moved += client.commit(moves.reservation)
        elif moves.left:
            time.sleep(_PAUSE_SECONDS)
        else:
            break
    return moved


def in_host_memory(client: Client) -> Copy:
    """Copy from memfd to memfd, without mapping them. Raises SegmentError."""

    def copy(pairs: Sequence[tuple[Location, Location]]) -> None:
        with raising_as({OSError: SegmentError}, "chunks cannot be moved"), ExitStack() as undo:
            fds: dict[SegmentId, int] = {}
            for id_ in {place.segment for pair in pairs for place in pair}:
                fds[id_] = client.open_segment(id_)[1]
                undo.callback(os.close, fds[id_])
            for old, new in pairs:
                done = 0
                while done < old.length:
                    files, at = (
                        (fds[old.segment], fds[new.segment]),
                        (old.offset + done, new.offset + done),
                    )
                    done += os.copy_file_range(*files, old.length - done, *at)

    return copy
