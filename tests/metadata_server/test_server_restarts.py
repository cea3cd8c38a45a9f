"""A server that starts again: what it believes of the one before, and what it never gives away."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from model import chunk_key
from processes import QUICK, Child, Raw, Stage, eventually, info, make_memfd
from server_cases import KIB, few_descriptors, has_room, offer, offering, put, reserving

from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool.generations import GenerationView

A, B, C, D, E = (chunk_key(n) for n in range(5))


def restart_with(stage_: Stage, client: Client, server: Child, **more: Any) -> Child:
    """Kill the server, start another one, wait until it has what `client` holds."""
    before, segments = client.epoch, len(client.list_segments())
    server.kill()
    again = stage_.server(**more)
    eventually(lambda: client.connected and client.epoch != before)
    eventually(lambda: len(client.list_segments()) == segments)
    return again


def test_a_reader_across_a_restart_believes_what_has_not_changed(stage_: Stage, memfd: int) -> None:
    """It found the chunks at the server that was killed, in the same table."""
    server = stage_.server()
    client = stage_.client(QUICK)
    view = GenerationView.of_segment(offer(client, info("s0", 4 * KIB), memfd), "s0")
    put(client, A, B, C, D)
    runs = client.pin([A, B, C, D], 60.0).runs

    def right() -> int:
        return sum(view.leading(run.slots, run.generations) for run in runs)

    restart_with(stage_, client, server)
    assert client.lookup([A, B, C, D]) == right() == 4
    # The new server knows nothing of the pin, and evicts the least recently used chunk.
    put(client, E)
    assert right() == 3
    client.drop_segment(m.SegmentId("s0"))
    assert view.dead


def test_a_segment_that_another_server_may_use_is_not_taken(stage_: Stage, memfd: int) -> None:
    """The earlier server is stopped, and its socket was removed: it may go on any time."""
    server = stage_.server()
    client = stage_.client(QUICK)
    table = offer(client, info("s0", 4 * KIB), memfd)
    put(client, A)
    with server.stopped():
        for name in (stage_.path, beside(stage_.path, ".lock")):
            name.unlink()
        stage_.server()
        raw = stage_.raw()
        again = ["add_segment", "s0", "host", "host", 4 * KIB, True]
        assert "has not ended" in raw.ask(*again, fds=(memfd, table))[1]
        assert raw.ask("list_segments") == ["segments", []]
    server.expect("does not lead to this server any more")
    eventually(lambda: raw.ask(*again, fds=(memfd, table))[0] == "added")
    assert raw.ask("contains", [A])[1] == [True]


def test_what_cannot_be_a_table_ends_no_server(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    strange = [memfd, make_memfd(1 << 20), os.open("/dev/null", os.O_RDONLY)]
    for fd in strange:
        with Raw(stage_.path, resets=fd) as raw:
            assert raw.welcome[0] == "welcome"
            refused = raw.ask("add_segment", "s0", "host", "host", 4 * KIB, True, fds=(memfd, fd))
            assert (refused[0], refused[2]) == ("error", False)
            assert raw.ask("list_segments") == ["segments", []]
    for fd in strange[1:]:
        os.close(fd)
    server.expect("not a server's table of resets")


def test_what_came_before_the_news_of_a_reset_is_forgotten(stage_: Stage, memfd: int) -> None:
    """A new client is quicker than those of before, and could have it from the offload tier."""
    server = stage_.server()
    client = stage_.client(QUICK)
    table = os.dup(offer(client, info("s0", 4 * KIB), memfd))
    client.clear(A[:8], reset=True)
    put(client, B)
    epoch = client.present([A]).epoch
    with Raw(stage_.path) as old:
        server.kill()
        client.close()
        stage_.server()
        fresh = make_memfd(4 * KIB)
        stage_.undo.callback(os.close, fresh)
        hasty = stage_.client(QUICK)
        offer(hasty, info("s1", 4 * KIB), fresh)
        put(hasty, A)
        with Raw(stage_.path, resets=old.fds[0]) as raw:
            assert raw.ask("contains", [A])[2] == epoch
            added = raw.ask("add_segment", "s0", "host", "host", 4 * KIB, True, fds=(memfd, table))
            assert added == ["added", 1]
    os.close(table)
    # Nothing tells whether A was computed before the reset or after it: its number is larger.
    assert hasty.contains([B]) == [True]


def watches(server: Child, process: Child) -> bool:
    """Whether the server has a pidfd of the process."""
    with suppress(FileNotFoundError):  # one was closed meanwhile
        files = Path(f"/proc/{server.pid}/fdinfo").iterdir()
        return any(f"\nPid:\t{process.pid}\n" in file.read_text() for file in files)
    return False


def test_slots_written_at_the_crash_are_not_given_to_others(stage_: Stage, memfd: int) -> None:
    """The writer is stopped: the next server has only its number, and looks for itself."""
    server = stage_.server()
    client = offering(stage_, memfd)
    writer = reserving(stage_)
    writer.signal(signal.SIGSTOP)
    again = restart_with(stage_, client, server)
    eventually(lambda: watches(again, writer))
    assert not has_room(client)
    assert client.stats().quarantined == 1
    assert client.stats().quarantined_slots == {writer.pid: 4}
    writer.signal(signal.SIGKILL)  # not reaped: a zombie writes nothing
    eventually(lambda: has_room(client))


# ---- descriptors


def test_a_server_without_descriptors_asks_for_the_resets_again(stage_: Stage) -> None:
    """Else it would not know of the resets in it. `free`: how many it has when a client comes."""
    server, client = stage_.server(), stage_.client(QUICK)
    client.clear(reset=True)
    reset = client.present([A]).epoch
    with Raw(stage_.path) as away:
        server.kill()
        client.close()
        server = stage_.server()
        used, refused = server.descriptors(), 0
        for free in range(1, 9):
            numbers = (number for number in range(1000) if number not in used)
            server.descriptors(limit=next(islice(numbers, free, None)))
            with Raw(stage_.path, resets=away.fds[0]) as raw:
                if raw.welcome[0] == "welcome":
                    assert raw.ask("contains", [A])[2] == reset
                    break
                assert "no descriptors left (ulimit -n)" in raw.welcome[1]
                refused += 1
            eventually(lambda: server.descriptors() == used)
    assert refused
    server.expect("no descriptors left (ulimit -n)")


@pytest.mark.parametrize("free", [0, 1])
def test_a_client_without_descriptors_is_back_with_the_resets_later(
    stage_: Stage, free: int
) -> None:
    """So the next server knows of the resets of this one."""
    server = stage_.server()
    client = stage_.client(QUICK)
    client.clear(reset=True)
    reset = client.present([A]).epoch
    client.close()
    with few_descriptors() as taken:
        for _ in range(free):
            os.close(taken.pop())
        client = stage_.client(QUICK)
        assert "descriptors" in client.trouble or "Too many open files" in client.trouble
    eventually(lambda: client.connected)
    restart_with(stage_, client, server)
    assert client.present([A]).epoch == reset
