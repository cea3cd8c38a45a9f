"""What the tests of a failing server have in common: writers in processes of their own, a pool of
four chunks.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from model import chunk_key
from processes import QUICK, Child, Stage, info

from vcache_backend.metadata_server.processes import Peer
from vcache_backend.metadata_server.requests import Service
from vcache_backend.metadata_server.slots import SlotRegion
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

KIB = 1 << 10

A_TURN = 40 * 1024
"""Calls of functions: some milliseconds."""

CLIENT = """
import os, sys, time
from pathlib import Path
from processes import PATIENT
from vcache_backend.protocol.client import Client
client = Client(Path(sys.argv[1]), PATIENT)
"""
"""The beginning of a script (`Stage.script`) with a client."""
RESERVE_AND_WAIT = f"""
{CLIENT}
from model import chunk_key
print("reserved", client.reserve([chunk_key(n) for n in range(4)], 1024).reservation)
time.sleep(60)
"""


def work_of(what: Callable[[], object]) -> int:
    """How many calls of functions it makes."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


def asked(service: Service, client: Peer, request: m.AnyRequest) -> m.Reply:
    return service.answer(client, request, [])[0]


def add_region(service: Service, segment: m.SegmentInfo) -> SlotRegion:
    """Use a segment of which there are no bytes."""
    region = SlotRegion.create(segment)
    service.directory.add(region)
    return region


def offering(stage_: Stage, memfd: int) -> Client:
    """One that is quick to notice what becomes of its server, and then offers its segment again."""
    client = stage_.client(QUICK)
    offer(client, info("s0", 4 * KIB), memfd)
    return client


def offer(client: Client, segment: m.SegmentInfo, fd: int) -> int:
    """Add a segment now, and again to each later server that lacks it. Returns its table's fd."""
    _, table = client.add_segment(segment, fd)

    def follow(infos: list[m.SegmentInfo]) -> None:
        if all(listed.id != segment.id for listed in infos):
            _, same = client.add_segment(segment, fd, table)
            os.close(same)

    client.on_segments = follow
    return table


def reserving(stage_: Stage) -> Child:
    """A process that has reserved the four slots, and goes on as if it wrote."""
    writer = stage_.script(RESERVE_AND_WAIT)
    writer.expect("reserved")
    return writer


def put(client: Client, *keys: m.ChunkKey) -> None:
    """Store chunks, whatever their bytes are."""
    reserved = client.reserve(list(keys), KIB)
    assert client.commit(reserved.reservation) == len(keys)


def has_room(client: Client) -> bool:
    """Could four chunks be reserved now? Leaves nothing behind."""
    reserved = client.reserve([chunk_key(n) for n in range(100, 104)], KIB)
    if reserved.reservation:
        client.abort(reserved.reservation)
    return all(isinstance(slot, m.Location) for slot in reserved.slots)


def use_up(taken: list[int]) -> None:
    """Take all descriptors that are left below the limit, also those that somebody gave back."""
    with suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def few_descriptors() -> Iterator[list[int]]:
    """This process has used up its descriptors; whoever closes one of these lends one to what comes
    next. Gone on leaving, and so is the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    try:
        use_up(taken)
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
