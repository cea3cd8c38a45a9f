"""A server that starts again: what it believes of the one before, and what it never gives away."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from model import chunk_key
from processes import QUICK, Child, Raw, Stage, eventually, info
from server_cases import KIB, has_room, offer, offering, put, reserving

from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool.generations import GenerationView

A, B, C, D, E = (chunk_key(n) for n in range(5))


def restart_with(alone: Stage, client: Client, server: Child, **more: Any) -> Child:
    """Kill the server, start another one, wait until it has what `client` holds."""
    before, segments = client.run_id, len(client.list_segments())
    server.kill()
    again = alone.server(**more)
    eventually(lambda: client.connected and client.run_id != before)
    eventually(lambda: len(client.list_segments()) == segments)
    return again


def test_a_reader_across_a_restart_believes_what_has_not_changed(alone: Stage, memfd: int) -> None:
    """It found the chunks at the server that was killed, in the same table."""
    server = alone.server()
    client = alone.client(QUICK)
    view = GenerationView.of_segment(offer(client, info("s0", 4 * KIB), memfd), "s0")
    put(client, A, B, C, D)
    runs = client.pin([A, B, C, D], 60.0).runs

    def right() -> int:
        return sum(view.leading(run.blocks, run.generations) for run in runs)

    restart_with(alone, client, server)
    assert client.lookup([A, B, C, D]) == right() == 4
    # The new server knows nothing of the pin, and evicts the least recently used chunk.
    put(client, E)
    assert right() == 3
    client.drop_segment(m.SegmentId("s0"))
    assert view.dead


def test_a_segment_that_another_server_may_use_is_not_taken(alone: Stage, memfd: int) -> None:
    """The earlier server is stopped, and its socket was removed: it may go on any time."""
    server = alone.server()
    client = alone.client(QUICK)
    table = offer(client, info("s0", 4 * KIB), memfd)
    put(client, A)
    with server.stopped():
        for name in (alone.path, beside(alone.path, ".lock")):
            name.unlink()
        alone.server()
        raw = alone.raw()
        again = ["add_segment", "s0", "host", "host", 4 * KIB, True]
        assert "has not ended" in raw.ask(*again, fds=(memfd, table))[1]
        assert raw.ask("list_segments") == ["segments", [], 0, []]
    server.expect("does not lead to this server any more")
    eventually(lambda: raw.ask(*again, fds=(memfd, table))[0] == "count")
    assert raw.ask("contains", [A])[1] == [True]


def test_a_later_server_knows_of_all_resets(alone: Stage, memfd: int) -> None:
    """Whoever comes first, and of a segment whose table comes late: else it could have what was
    forgotten from the offload tier, or again from the table."""
    server, client = alone.server(), alone.client(QUICK)
    offer(client, info("s0", 4 * KIB), memfd)
    put(client, A)
    client.clear(A[:8], reset=True)
    put(client, B)
    epoch = client.present([A]).epoch
    for number in (signal.SIGKILL, signal.SIGTERM):
        server.signal(number)
        server.wait()
        server = alone.server()
        with Raw(alone.path) as raw:
            assert raw.ask("contains", [A])[2] == epoch > 0
    # Until it hears of a server's end, it takes the connection for a good one.
    eventually(lambda: client.run_id == raw.welcome[1] and client.list_segments())
    assert client.contains([A, B]) == [False, True]


def watches(server: Child, process: Child) -> bool:
    """Whether the server has a pidfd of the process."""
    with suppress(FileNotFoundError):  # one was closed meanwhile
        files = Path(f"/proc/{server.pid}/fdinfo").iterdir()
        return any(f"\nPid:\t{process.pid}\n" in file.read_text() for file in files)
    return False


def test_slots_written_at_the_crash_are_not_given_to_others(alone: Stage, memfd: int) -> None:
    """The writer is stopped: the next server has only its number, and looks for itself."""
    server = alone.server()
    client = offering(alone, memfd)
    writer = reserving(alone)
    writer.signal(signal.SIGSTOP)
    again = restart_with(alone, client, server)
    eventually(lambda: watches(again, writer))
    assert not has_room(client)
    assert client.stats().quarantined_slots == {writer.pid: 4}
    writer.signal(signal.SIGKILL)  # not reaped: a zombie writes nothing
    eventually(lambda: has_room(client))
