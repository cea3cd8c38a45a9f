"""A server that starts again: what it believes of the one before, and what it never gives away."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model import chunk_key
from processes import QUICK, Child, Stage, eventually, info, make_memfd, running
from server_cases import (
    IN_A_PID_NAMESPACE,
    IN_A_TIME_NAMESPACE,
    ISOLATES,
    KIB,
    has_room,
    offering,
    put,
    reserving,
)

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError, ServerUnavailable
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.server import Server

A, B, C, D, E = (chunk_key(n) for n in range(5))


def restart_with(stage_: Stage, client: Client, server: Child, **config: Any) -> Child:
    """Kill the server, start another one, wait until `client` has offered it what it holds."""
    before = client.epoch
    server.kill()
    eventually(lambda: not client.connected)
    again = stage_.server(**config)
    eventually(lambda: client.connected and client.epoch != before)
    return again


def flipped(journal: Path, old: bytes) -> bytes:
    data = bytearray(journal.read_bytes())
    data[-40] ^= 4
    return bytes(data)


def test_a_slot_leased_from_a_killed_server_is_not_handed_out_before_the_grace_of_the_lease_is_over(
    stage_: Stage, memfd: int
) -> None:
    """The next server starts at once, in this process, and knows the leased chunk's slot as one to
    evict.
    """
    server = stage_.server()
    writer, reader = stage_.client(QUICK), stage_.client(QUICK)
    writer.offer(info("s0", 4 * KIB), memfd)
    put(writer, A, B, C, D)
    asked = time.monotonic()
    leased = reader.acquire([A, B, C, D])
    server.kill()

    def handed_out() -> bool:
        try:
            return bool(writer.reserve([E], KIB).reservation)
        except ServerUnavailable:
            return False

    with running(stage_.path):
        eventually(handed_out)
        assert time.monotonic() > asked + m.GRACE_SECONDS
        eventually(lambda: reader.connected)
        assert reader.release(leased.lease) is False


def test_a_lease_of_another_life_names_nothing_though_the_clock_was_set_back(
    stage_: Stage, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life grants one lease, at the same time of day, before anything else has a number."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000 * 10**9)
    leases, epochs = [], set()
    for name in ("s0", "s1"):
        with running(stage_.path, journal=False):
            client = stage_.client(reconnect=False)
            client.add_segment(info(name, 4 * KIB), memfd)
            eventually(lambda client=client: client.reserve([A], KIB).reservation)
            put(client, B)
            leases.append(client.acquire([B]).lease)
            epochs.add(client.epoch)
            assert client.release(leases[0]) is (len(leases) == 1)
    assert len(epochs) == 2


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda journal, old: old,
        lambda journal, old: journal.read_bytes()[: len(old)] + b"torn",
    ],
    ids=["a bit flipped", "an older copy of it put back", "cut"],
)
def test_a_journal_that_is_not_the_last_word_costs_the_contents_and_nothing_else(
    stage_: Stage, memfd: int, damage: Callable[[Path, bytes], bytes]
) -> None:
    """When the older copy was made, C was where E is now."""
    server, journal = stage_.server(), beside(stage_.path, ".journal")
    client = offering(stage_, memfd)
    put(client, A, B, C, D)
    old = journal.read_bytes()
    client.remove([C])
    put(client, E)
    assert old != journal.read_bytes()[: len(old) - 1]
    journal.write_bytes(damage(journal, old))
    server = restart_with(stage_, client, server)
    eventually(lambda: client.list_segments() == [])
    assert client.contains([A, B, C, D, E]) == [False] * 5
    fresh = make_memfd(4 * KIB)
    stage_.undo.callback(os.close, fresh)
    client.offer(info("s1", 4 * KIB), fresh)
    eventually(lambda: has_room(client))  # not at once: readers of before count on their grace
    put(client, E)
    restart_with(stage_, client, server)
    eventually(lambda: client.contains([C, E]) == [False, True])
    assert beside(journal, ".damaged").exists() is (damage is flipped)


def test_a_server_that_can_neither_write_nor_remove_its_journal_goes_on_and_the_next_does_not_believe_it(
    stage_: Stage, memfd: int
) -> None:
    server, journal = stage_.server(), beside(stage_.path, ".journal")
    client = offering(stage_, memfd)
    put(client, A, B, C, D)
    stale = journal.rename(beside(journal, ".stale"))
    journal.mkdir()
    size = stale.stat().st_size
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, size))
    client.remove([C])
    put(client, E)
    server.expect("journal: [Errno 27] File too large; going on without one")
    assert client.lookup([E]) == 1
    journal.rmdir()
    stale.rename(journal)
    restart_with(stage_, client, server)
    eventually(lambda: client.list_segments() == [])
    assert client.contains([A, B, C, D, E]) == [False] * 5


def test_no_server_starts_beside_one_that_still_writes_the_journal(stage_: Stage) -> None:
    server = stage_.server()
    with server.stopped():
        for path in (stage_.path, beside(stage_.path, ".lock")):
            path.unlink()
        with pytest.raises(ConfigError, match=f"pid {server.pid} still serves"):
            Server(ServerConfig(socket=str(stage_.path)))


def test_slots_being_written_at_the_crash_are_not_given_to_others(
    stage_: Stage, memfd: int
) -> None:
    server = stage_.server()
    client = offering(stage_, memfd)
    writer = reserving(stage_)
    server.kill()
    eventually(lambda: not client.connected)
    stage_.server()
    eventually(
        lambda: (
            client.connected
            and client.list_segments()
            and client.list_segments()[0].state == "live"
        )
    )
    assert not has_room(client)
    assert client.stats().quarantined == 1
    writer.kill()
    eventually(lambda: has_room(client))


@pytest.mark.skipif(not ISOLATES, reason="needs the right to make a pid namespace")
@pytest.mark.parametrize(
    "elsewhere", [IN_A_PID_NAMESPACE, IN_A_TIME_NAMESPACE], ids=["pid", "time"]
)
def test_a_server_that_starts_again_in_another_namespace_takes_nobody_for_gone(
    stage_: Stage, memfd: int, elsewhere: list[str]
) -> None:
    """The journal has the writer's pid of before, which here is nobody's, or somebody else's; and
    its start, by a clock of before.
    """
    server = stage_.server()
    client = offering(stage_, memfd)
    reserving(stage_)
    before = client.epoch
    server.kill()
    command = [
        *elsewhere,
        sys.executable,
        "-m",
        "vcache_backend.metadata_server",
        "--socket",
        str(stage_.path),
    ]
    stage_.undo.enter_context(Child(command)).expect("serving")
    eventually(
        lambda: (
            client.connected
            and client.epoch != before
            and [i.state for i in client.list_segments()] == ["live"]
        )
    )
    time.sleep(0.2)  # some ticks
    assert client.stats().quarantined == 1
    assert not has_room(client)
