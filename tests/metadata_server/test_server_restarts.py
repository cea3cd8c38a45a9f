"""A server that starts again: what it believes of the one before, and what it never gives away."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import processes
import pytest
from model import chunk_key
from processes import QUICK, Child, Raw, Stage, containers, eventually, info, make_memfd, running
from server_cases import KIB, few_descriptors, has_room, offer, offering, put, reserving

from vcache_backend.errors import ServerUnavailable
from vcache_backend.metadata_server import succession
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.processes import (
    Counted,
    EpochTable,
    Held,
    ProcessId,
    Record,
    SegmentAdded,
)
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

A, B, C, D, E = (chunk_key(n) for n in range(5))


def restart_with(stage_: Stage, client: Client, server: Child, **more: Any) -> Child:
    """Kill the server, start another one, wait until it has what `client` holds."""
    before = client.epoch
    server.kill()
    again = stage_.server(**more)
    eventually(lambda: client.connected and client.epoch != before)
    eventually(lambda: all(one.state == "live" for one in client.list_segments()))
    return again


def test_a_killed_server_s_leases_hold_for_their_grace(stage_: Stage, memfd: int) -> None:
    """The next server starts at once, in this process, and knows the leased chunk's slot as one to
    evict.
    """
    server = stage_.server()
    writer, reader = stage_.client(QUICK), stage_.client(QUICK)
    offer(writer, info("s0", 4 * KIB), memfd)
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
        with running(stage_.path):
            client = stage_.client(reconnect=False)
            client.add_segment(info(name, 4 * KIB), memfd)
            eventually(lambda client=client: client.reserve([A], KIB).reservation)
            put(client, B)
            leases.append(client.acquire([B]).lease)
            epochs.add(client.epoch)
            assert client.release(leases[0]) is (len(leases) == 1)
    assert len(epochs) == 2


def test_a_ledger_that_was_taken_over_costs_the_contents_alone(stage_: Stage, memfd: int) -> None:
    """A client was stopped while the next server gave C's slot to E, and has still the ledger of
    before.
    """
    server = stage_.server()
    client = offering(stage_, memfd)
    put(client, A, B, C, D)
    late = stage_.undo.enter_context(Raw(stage_.path))
    server = restart_with(stage_, client, server)
    eventually(lambda: client.lookup([A, B, C, D]) == 4)
    client.remove([C])
    eventually(lambda: client.reserve([], KIB).reason == "")  # readers of before have their grace
    put(client, E)
    server.kill()
    client.close()
    server = stage_.server()
    with Raw(stage_.path, ledger=late.fds[0]) as raw:
        refused = raw.ask("add_segment", "s0", "host", "host", 4 * KIB, True, fds=(memfd,))
        assert (refused[0], refused[2]) == ("error", False)
        assert "is in no ledger" in refused[1]
        assert raw.ask("list_segments") == ["segments", []]


FORGED: dict[str, list[Record]] = {
    "a pid": [Held(1, ProcessId(1 << 63, 5), {})],
    "a generation": [Counted((1 << 64) - 1)],
    "an epoch": [EpochTable({b"": (1 << 64) - 1})],
    "segments": [SegmentAdded(m.SegmentId(f"t{n}"), "host", "host", KIB) for n in range(401)],
}


@pytest.mark.parametrize("records", FORGED.values(), ids=FORGED)
def test_a_forged_ledger_ends_no_server(stage_: Stage, memfd: int, records: list[Record]) -> None:
    """Any process of the server's user can make one."""
    server = stage_.server()
    forged = Ledger(77)
    client = os.dup(forged.fd)
    stage_.undo.callback(os.close, client)
    forged.write(records, lambda record: [])
    forged.close()
    with Raw(stage_.path, ledger=client) as raw:
        assert raw.welcome[0] == "welcome"
        server.expect("nothing of that server's pool is used")
        assert raw.ask("add_segment", "s0", "host", "host", 4 * KIB, fds=(memfd,)) == ["count", 0]
        assert raw.ask("reserve", [A], KIB)[0] == "reserved"
        assert raw.ask("clear", b"", True)[0] == "count"
        assert len(raw.ask("list_segments")[1]) == 1
    assert stage_.client().stats().clients == 1


def test_who_missed_whole_servers_makes_the_next_forget_nothing(stage_: Stage, memfd: int) -> None:
    """It was stopped while they were restarted again and again, and others were served by each."""
    server = stage_.server()
    client = offering(stage_, memfd)
    with Raw(stage_.path) as away:
        for _ in range(3):
            server = restart_with(stage_, client, server)
        Raw(stage_.path, ledger=away.fds[0]).close()
    assert client.present([A]).epoch == 0


def test_who_missed_a_server_may_be_back_before_who_knows_it(
    stage_: Stage, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served once another client has brought the ledger of the missed one."""
    monkeypatch.setattr(succession, "HEIR_SECONDS", 1000)
    server = stage_.server()
    client = offering(stage_, memfd)
    with Raw(stage_.path) as away:
        server = restart_with(stage_, client, server)
        with Raw(stage_.path) as known:
            server.kill()
            client.close()
            with running(stage_.path, recover_seconds=1000), Raw(stage_.path, False) as first:
                first.send("hello", m.PROTOCOL_VERSION, "host", "host", {}, fds=tuple(away.fds[:1]))
                with Raw(stage_.path) as fresh:
                    assert fresh.ask("contains", [A])[2] == 0
                Raw(stage_.path, ledger=known.fds[0]).close()
                assert first.receive()[0] == "welcome"
                assert first.ask("contains", [A])[2] == 0


def test_who_missed_a_server_that_nobody_knows_is_served_after_a_while(stage_: Stage) -> None:
    """That server may have had resets, so all are repeated."""
    server = stage_.server()
    with Raw(stage_.path) as away:
        server.kill()
        server = stage_.server()
        Raw(stage_.path, ledger=away.fds[0]).close()
        server.kill()
        stage_.server(recover_seconds=0.5)
        with Raw(stage_.path, ledger=away.fds[0]) as late:
            assert late.welcome[0] == "welcome"
            assert late.ask("contains", [A])[2] > 0


def test_every_ledger_that_nobody_has_taken_over_is_believed(stage_: Stage, memfd: int) -> None:
    """A client was stopped through the whole life of the next server, which served others."""
    server = stage_.server()
    away = stage_.client(QUICK)
    offer(away, info("s0", 4 * KIB), memfd)
    put(away, A, B)
    with Raw(stage_.path) as raw:
        kept = os.dup(raw.fds[0])
    server.kill()
    away.close()
    server = stage_.server()
    fresh = make_memfd(4 * KIB)
    stage_.undo.callback(os.close, fresh)
    client = stage_.client(QUICK)
    offer(client, info("s1", 4 * KIB), fresh)
    put(client, B, C)
    restart_with(stage_, client, server)
    eventually(lambda: client.contains([B, C]) == [True, True])
    with Raw(stage_.path, ledger=kept) as raw:
        absent = raw.ask("open_segment", "s0")
        assert (absent[0], absent[2]) == ("error", False)
        added = raw.ask("add_segment", "s0", "host", "host", 4 * KIB, True, fds=(memfd,))
        assert added == ["count", 1], "A; B was stored anew"
    os.close(kept)
    assert client.contains([A, B, C]) == [True] * 3
    server.kill()


def test_what_came_before_the_news_of_a_reset_is_forgotten(stage_: Stage, memfd: int) -> None:
    """A new client is quicker than those of before, and could have it from the offload tier."""
    server = stage_.server()
    client = offering(stage_, memfd)
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
        with Raw(stage_.path, ledger=old.fds[0]) as raw:
            added = raw.ask("add_segment", "s0", "host", "host", 4 * KIB, True, fds=(memfd,))
            assert added == ["count", 1]
    assert (hasty.contains([A, B]), hasty.present([A]).epoch) == ([False, True], epoch)


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


@pytest.mark.skipif(bool(containers()), reason=f"needs namespaces of its own: {containers()}")
def test_a_server_in_another_namespace_takes_nobody_for_gone(stage_: Stage, memfd: int) -> None:
    """The ledger has the writer's pid of before, which here is nobody's, or somebody else's; and
    its start, by a clock of before.
    """
    server = stage_.server()
    client = offering(stage_, memfd)
    reserving(stage_)
    restart_with(stage_, client, server, within=processes.IN_A_CONTAINER)
    time.sleep(0.2)  # some ticks
    assert client.stats().quarantined == 1
    assert not has_room(client)


# ---- descriptors


def test_a_server_without_descriptors_for_a_ledger_asks_for_it_again(stage_: Stage) -> None:
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
            with Raw(stage_.path, ledger=away.fds[0]) as raw:
                if raw.welcome[0] == "welcome":
                    assert raw.ask("contains", [A])[2] == reset
                    break
                assert "no descriptors left (ulimit -n)" in raw.welcome[1]
                refused += 1
            eventually(lambda: server.descriptors() == used)
    assert refused
    server.expect("no descriptors left (ulimit -n)")


@pytest.mark.parametrize("free", [0, 1])
def test_a_client_without_descriptors_is_back_with_a_ledger_later(stage_: Stage, free: int) -> None:
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
