"""What happens when processes die, hang and come back. Real processes, real signals; nothing waits
longer than it says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import processes
import pytest
from instance_cases import find
from model import chunk_key
from processes import (
    IN_A_CONTAINER,
    QUICK,
    SECONDS,
    Child,
    Raw,
    Stage,
    containers,
    eventually,
    info,
)
from server_cases import KIB, RESERVE_AND_WAIT, has_room

from vcache_backend.errors import ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.metadata_server.processes import Watch, identity, started
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

A, B, C, D, E = (chunk_key(n) for n in range(5))

# ---- the server hangs


def answers(client: Client) -> bool:
    with suppress(VCacheError):
        return client.lookup([A]) == 0
    return False


def test_a_call_to_a_hung_server_ends_and_the_next_ask_nobody(alone: Stage, memfd: int) -> None:
    """Also while the background thread tries again: it holds nothing that a call would wait for."""
    server = alone.server()
    calls: list[Callable[[Client], Any]] = [
        lambda client: client.lookup([A]),
        lambda client: client.lookup([A] * 60_000),  # larger than the socket's buffer
        lambda client: client.stats(),
        lambda client: client.add_segment(info("s0", 4 * KIB), memfd),
        lambda client: client.send_find(find(1), SECONDS).answer(),
    ]
    clients = [alone.client(msgspec.structs.replace(QUICK, heartbeat_seconds=30)) for _ in calls]
    eventually(lambda: all(client.connected for client in clients))
    with processes.hung(server, *clients):
        for client, call in zip(clients, calls, strict=True):
            with pytest.raises(ServerTimeout):
                call(client)
            for _ in range(20):
                with pytest.raises(ServerUnavailable):
                    client.lookup([A])
        with pytest.raises(ServerUnavailable, match=r"did not answer in 0\.5 s: it is stopped"):
            alone.client(processes.hasty(QUICK), reconnect=False).require()
        clients[-1].close()
    for client in clients[:-1]:
        eventually(lambda client=client: answers(client))


# ---- writers die


@pytest.mark.skipif(bool(containers()), reason=f"needs namespaces of its own: {containers()}")
def test_a_writer_in_another_container_keeps_its_slots(alone: Stage, memfd: int) -> None:
    """As between containers: neither sees the other's pid. The writer's own pidfd, which it sends,
    tells the server of its end.
    """
    alone.server(within=IN_A_CONTAINER, reservation_seconds=0.2)
    client = alone.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    inside = [*IN_A_CONTAINER, sys.executable, "-c", RESERVE_AND_WAIT, str(alone.path)]
    unshare = alone.undo.enter_context(Child(inside))
    unshare.expect("reserved")
    writer = int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text())
    os.kill(writer, signal.SIGSTOP)
    eventually(lambda: client.stats().quarantined_slots == {0: 4})
    time.sleep(0.2)  # some ticks
    assert not has_room(client)
    os.kill(writer, signal.SIGKILL)
    eventually(lambda: has_room(client))


def test_a_writer_lives_on_where_descriptors_are_too_few_to_look(alone: Stage, memfd: int) -> None:
    """Exactly one is free: the writer's pidfd takes it, and nothing is left to look at the process
    with.
    """
    server = alone.server(reservation_seconds=0.3)
    writer = alone.raw()
    assert writer.ask("add_segment", "s0", "host", "host", 4 * KIB, fds=(memfd,))[0] == "count"
    assert writer.ask("reserve", [A, B, C, D], KIB)[1]
    used = server.descriptors()
    first, second = [number for number in range(max(used) + 3) if number not in used][:2]
    assert first < second
    server.descriptors(limit=second)
    eventually(lambda: writer.ask("stats")[6])
    time.sleep(0.2)  # some ticks
    assert writer.ask("stats")[6] == {os.getpid(): 4}, "slots in quarantine"
    assert writer.ask("reserve", [E], KIB)[3] == [m.Refusal.FULL]


def test_slots_of_which_the_writer_has_not_read_are_free_once_it_has_hung_up(
    alone: Stage, memfd: int
) -> None:
    """The process lives on: a call of its was interrupted between request and answer."""
    alone.server()
    client = alone.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    raw = alone.raw()
    raw.send("reserve", [A, B, C, D], KIB)
    assert eventually(lambda: client.stats().reservations) == 1
    raw.close()
    # Long before the reservation would have ended by itself.
    eventually(lambda: has_room(client), 20)
    # Who has read it may write, although the connection is gone.
    raw = alone.raw()
    assert raw.ask("reserve", [A, B, C, D], KIB)[1]
    raw.close()
    eventually(lambda: client.stats().quarantined_slots)
    assert not has_room(client)


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_a_segment_for_which_descriptors_are_too_few_is_added_once_there_are_enough(
    alone: Stage, memfd: int, again: bool
) -> None:
    """They run out at each place in turn. Nothing stays open, above all not the table's lock."""
    server = alone.server()
    with Raw(alone.path) as first:
        first.ask("add_segment", "s0", "host", "host", 4 * KIB, fds=(memfd,))
        table = os.dup(first.fds[-1])
    server.kill()
    server, raw = alone.server(), alone.raw()
    used, refused = server.descriptors(), 0
    free = [number for number in range(max(used) + 20) if number not in used]
    request = ["add_segment", "s0", "host", "host", 4 * KIB, again]
    for limit in free:
        server.descriptors(limit=limit)
        if raw.ask(*request, fds=(memfd, table)[: 1 + again])[0] == "count":
            break
        refused += 1
        server.descriptors(limit=1000)
        eventually(lambda: server.descriptors() == used)
    assert 3 < refused < len(free)
    os.close(table)


def test_without_descriptors_new_clients_wait_and_cost_nothing(alone: Stage) -> None:
    server = alone.server()
    raw = alone.raw()
    server.descriptors(limit=3)
    waiting = [alone.raw(hello=False) for _ in range(3)]
    for one in waiting:
        one.send("hello", m.PROTOCOL_VERSION, "host", "host", {})
    status = Path(f"/proc/{server.pid}/status")

    def slept() -> int:
        return int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = slept() + 1
    eventually(lambda: slept() > before)
    assert raw.ask("stats")[0] == "server_stats", "those are looked at just then"
    server.descriptors(limit=1000)
    assert all(one.receive()[0] == "welcome" for one in waiting)
    server.signal(signal.SIGTERM)
    _, said = server.wait()
    assert said.count("no new client can connect") == 1


def test_a_process_whose_pid_another_one_has_by_now_has_ended() -> None:
    here = identity(os.getpid())
    earlier = msgspec.structs.replace(here, started=here.started - 1)
    assert Watch().ended({here, earlier}, set()) == [earlier]


def test_a_process_may_have_any_name() -> None:
    """Its name is bytes, cut at 15: half a character, brackets, newlines."""
    name, began = Path("/proc/self/comm"), started(os.getpid())
    before = name.read_bytes()
    name.write_bytes(b"\xe6\xa8) R 1\n(\xff")
    try:
        assert started(os.getpid()) == began > 0
    finally:
        name.write_bytes(before.rstrip(b"\n"))
