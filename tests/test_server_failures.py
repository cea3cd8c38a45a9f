"""What happens when processes die, hang and come back. Real processes, real signals; nothing waits longer than it says."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model import chunk_key
from processes import HASTY, PATIENT, QUICK, Child, Stage, eventually, info, make_memfd, read_at, running, write_at

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError, ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.server import Server

KIB = 1 << 10
A, B, C, D, E = (chunk_key(n) for n in range(5))

WRITER = """
import os, sys, time
from pathlib import Path
from vcache_backend.config import ClientConfig
from vcache_backend.metadata_server.client import Client
sys.path.insert(0, "tests")
from model import chunk_key
client = Client(Path(sys.argv[1]), ClientConfig(request_seconds=10, heartbeat_seconds=60))
keys = [chunk_key(n) for n in range(4)]
"""
RESERVE_AND_WAIT = WRITER + 'print("reserved", client.reserve(keys, 1024).reservation); time.sleep(60)'
RESERVE_AND_HANG_UP = WRITER + 'client.reserve(keys, 1024); client.close(); print("hung up"); time.sleep(60)'
RESERVE_AND_LEAVE_A_CHILD = (
    WRITER
    + """
client.reserve(keys, 1024)
if os.fork() == 0:
    os.setsid()
    print("orphan", os.getpid(), flush=True)
    time.sleep(60)
os._exit(0)
"""
)
ACQUIRE_AND_WAIT = WRITER + 'print("leased", len(client.acquire(keys).locations)); time.sleep(60)'


def pool(stage_: Stage, memfd: int, **config: Any) -> Client:
    """A client of a new server, with a segment of four chunks that nobody offers again."""
    stage_.server(**config)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    return client


def offering(stage_: Stage, memfd: int) -> Client:
    """One that is quick to notice what becomes of its server, and then offers its segment again."""
    client = stage_.client(QUICK)
    client.offer(info("s0", 4 * KIB), memfd)
    return client


def reserving(stage_: Stage) -> Child:
    """A process that has reserved the four slots, and goes on as if it wrote."""
    writer = stage_.script(RESERVE_AND_WAIT)
    writer.expect("reserved")
    return writer


def put(client: Client, fd: int, *keys: m.ChunkKey) -> list[m.Location]:
    """Store chunks whose bytes are their keys."""
    reserved = client.reserve(list(keys), KIB)
    places = [slot for slot in reserved.slots if isinstance(slot, m.Location)]
    for key, place in zip(keys, places, strict=True):
        write_at(fd, place, content(key))
    assert client.commit(reserved.reservation) == len(keys)
    return places


def content(key: bytes) -> bytes:
    return (key * KIB)[:KIB]


def has_room(client: Client) -> bool:
    """Could four chunks be reserved now? Leaves nothing behind."""
    reserved = client.reserve([chunk_key(n) for n in range(100, 104)], KIB)
    if reserved.reservation:
        client.abort(reserved.reservation)
    return all(isinstance(slot, m.Location) for slot in reserved.slots)


# ---- the server is absent, dies, comes back


def test_a_killed_server_is_noticed_at_once(stage_: Stage) -> None:
    server = stage_.server()
    client = stage_.client(QUICK)
    assert client.lookup([A]) == 0
    before = len(os.listdir("/proc/self/fd"))
    server.kill()
    with pytest.raises(ServerUnavailable):
        client.lookup([A])
    # One more at times, while it tries to come back.
    eventually(lambda: len(os.listdir("/proc/self/fd")) < before)


def test_a_restarted_server_has_the_contents_back(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    client, reader = stage_.client(QUICK), stage_.client(QUICK)
    client.offer(info("s0", 4 * KIB), memfd)
    places = put(client, memfd, A, B, C)
    client.remove([C])
    epoch, lease = client.epoch, reader.acquire([A]).lease
    server.kill()
    eventually(lambda: not client.connected)
    stage_.server()
    eventually(lambda: client.connected and reader.connected)
    eventually(lambda: client.lookup([A, B, C]) == 2)
    assert client.epoch != epoch
    assert reader.renew(lease) is reader.release(lease) is False
    leased = reader.acquire([A, B])
    assert leased.locations == places[:2]
    _, fd = reader.open_segment(m.SegmentId("s0"))
    stage_.undo.callback(os.close, fd)
    assert [read_at(fd, place) for place in leased.locations] == [content(A), content(B)]


def test_a_slot_leased_from_a_killed_server_is_not_handed_out_before_the_grace_of_the_lease_is_over(
    stage_: Stage, memfd: int
) -> None:
    """The next server starts at once, in this process, and knows the leased chunk's slot as one to evict."""
    server = stage_.server()
    writer, reader = stage_.client(QUICK), stage_.client(QUICK)
    writer.offer(info("s0", 4 * KIB), memfd)
    put(writer, memfd, A, B, C, D)
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
            put(client, memfd, B)
            leases.append(client.acquire([B]).lease)
            epochs.add(client.epoch)
            assert client.release(leases[0]) is (len(leases) == 1)
    assert len(epochs) == 2


def restart_with(stage_: Stage, client: Client, server: Child, **config: Any) -> Child:
    """Kill the server, start another one, wait until `client` has offered it what it holds."""
    before = client.epoch
    server.kill()
    eventually(lambda: not client.connected)
    again = stage_.server(**config)
    eventually(lambda: client.connected and client.epoch != before)
    return again


def test_memory_that_no_journal_knows_is_never_handed_out_again(stage_: Stage, memfd: int) -> None:
    """Somebody may be stopped between his reservation and his copy, and no journal tells who and where."""
    server = stage_.server(journal=False)
    client = offering(stage_, memfd)
    reserving(stage_)
    restart_with(stage_, client, server, journal=False)
    eventually(lambda: client.list_segments() == [] and not client._offers)
    assert client.reserve([E], KIB).slots == [m.Refusal.NO_SEGMENT]


def flipped(journal: Path, old: bytes) -> bytes:
    data = bytearray(journal.read_bytes())
    data[-40] ^= 4
    return bytes(data)


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda journal, old: old, lambda journal, old: journal.read_bytes()[: len(old)] + b"torn"],
    ids=["a bit flipped", "an older copy of it put back", "cut"],
)
def test_a_journal_that_is_not_the_last_word_costs_the_contents_and_nothing_else(
    stage_: Stage, memfd: int, damage: Callable[[Path, bytes], bytes]
) -> None:
    """When the older copy was made, C was where E is now."""
    server, journal = stage_.server(), beside(stage_.path, ".journal")
    client = offering(stage_, memfd)
    put(client, memfd, A, B, C, D)
    old = journal.read_bytes()
    client.remove([C])
    put(client, memfd, E)
    assert old != journal.read_bytes()[: len(old) - 1]
    journal.write_bytes(damage(journal, old))
    server = restart_with(stage_, client, server)
    eventually(lambda: client.list_segments() == [])
    assert client.contains([A, B, C, D, E]) == [False] * 5
    fresh = make_memfd(4 * KIB)
    stage_.undo.callback(os.close, fresh)
    client.offer(info("s1", 4 * KIB), fresh)
    eventually(lambda: has_room(client))  # not at once: readers of before count on their grace
    put(client, fresh, E)
    restart_with(stage_, client, server)
    eventually(lambda: client.contains([C, E]) == [False, True])
    assert beside(journal, ".damaged").exists() is (damage is flipped)


def test_a_server_that_can_neither_write_nor_remove_its_journal_goes_on_and_the_next_does_not_believe_it(
    stage_: Stage, memfd: int
) -> None:
    server, journal = stage_.server(), beside(stage_.path, ".journal")
    client = offering(stage_, memfd)
    put(client, memfd, A, B, C, D)
    stale = journal.rename(beside(journal, ".stale"))
    journal.mkdir()
    size = stale.stat().st_size
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, size))
    client.remove([C])
    put(client, memfd, E)
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


def test_segments_nobody_offers_again_are_given_up(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    worker = stage_.client(PATIENT, reconnect=False)
    worker.add_segment(info("s0", 4 * KIB), memfd)
    put(worker, memfd, A)
    server.kill()
    stage_.server(recover_seconds=0.2)
    client = stage_.client()
    eventually(lambda: client.list_segments() == [])


def test_slots_being_written_at_the_crash_are_not_given_to_others(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    client = offering(stage_, memfd)
    writer = reserving(stage_)
    server.kill()
    eventually(lambda: not client.connected)
    stage_.server()
    eventually(lambda: client.connected and client.list_segments() and client.list_segments()[0].state == "live")
    assert not has_room(client)
    assert client.stats().quarantined == 1
    writer.kill()
    eventually(lambda: has_room(client))


# ---- the server hangs


def answers(client: Client) -> bool:
    with suppress(VCacheError):
        return client.lookup([A]) == 0
    return False


def test_a_call_to_a_hung_server_ends_and_the_next_ones_ask_nobody(stage_: Stage, memfd: int) -> None:
    """Also while the background thread tries again: it holds nothing that a call would wait for."""
    server = stage_.server()
    calls: list[Callable[[Client], Any]] = [
        lambda client: client.lookup([A]),
        lambda client: client.lookup([A] * 60_000),  # larger than the socket's buffer
        lambda client: client.stats(),
        lambda client: client.add_segment(info("s0", 4 * KIB), memfd),
        lambda client: client.send_lookup([A]).answer(),
    ]
    clients = [stage_.client(msgspec.structs.replace(HASTY, heartbeat_seconds=30)) for _ in calls]
    eventually(lambda: all(client.connected for client in clients))
    with server.stopped():
        for client, call in zip(clients, calls, strict=True):
            with pytest.raises(ServerTimeout):
                call(client)
            for _ in range(20):
                with pytest.raises(ServerUnavailable):
                    client.lookup([A])
        with pytest.raises(ServerUnavailable, match=r"did not answer in 0\.5 s: it is stopped"):
            stage_.client(HASTY, reconnect=False).require()
        clients.pop().close()
    for client in clients:
        eventually(lambda client=client: answers(client))


# ---- writers die


def test_a_writer_killed_between_reserve_and_commit_gives_its_slots_back(stage_: Stage, memfd: int) -> None:
    client = pool(stage_, memfd)
    before = len(stage_.servers[0].fds())
    for _ in range(2):
        writer = reserving(stage_)
        assert not has_room(client)
        writer.signal(signal.SIGKILL)  # not reaped: a zombie writes nothing
        eventually(lambda: has_room(client))
    assert client.lookup([A]) == 0
    assert client.stats().quarantined == 0
    eventually(lambda: len(stage_.servers[0].fds()) <= before)


def test_a_writer_that_only_hangs_up_keeps_its_slots_until_it_is_gone(stage_: Stage, memfd: int) -> None:
    client = pool(stage_, memfd)
    writer = stage_.script(RESERVE_AND_HANG_UP)
    writer.expect("hung up")
    eventually(lambda: client.stats().quarantined == 1)
    time.sleep(0.2)  # some ticks
    assert not has_room(client)
    assert client.reserve([A], KIB).slots == [m.Refusal.FULL]
    writer.kill()
    eventually(lambda: has_room(client))


def test_a_writer_that_is_stopped_keeps_its_slots_past_its_reservation(stage_: Stage, memfd: int) -> None:
    """A stopped process has not stopped its GPU's copies: only its word or its end give the slots back."""
    client = pool(stage_, memfd, reservation_seconds=0.2)
    writer = reserving(stage_)
    writer.signal(signal.SIGSTOP)
    eventually(lambda: client.stats().quarantined == 1)
    assert client.stats().quarantined_slots == {writer.pid: 4}
    assert not has_room(client)
    writer.kill()
    eventually(lambda: has_room(client))


def test_a_dead_writer_s_slots_come_back_though_its_child_keeps_the_connection_open(stage_: Stage, memfd: int) -> None:
    """The connection ends only with the orphan that inherited it, so expiry voids the reservation; the writer is long gone by then."""
    client = pool(stage_, memfd, reservation_seconds=0.5)
    writer = stage_.script(RESERVE_AND_LEAVE_A_CHILD)
    orphan = int(writer.expect("orphan").split()[1])
    try:
        writer.process.wait(10)
        eventually(lambda: has_room(client))
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)


IN_A_PID_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
ISOLATES = subprocess.run([*IN_A_PID_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not ISOLATES, reason="needs the right to make a pid namespace")
def test_between_pid_namespaces_a_writer_s_slots_come_back_when_it_is_gone_and_not_before(stage_: Stage, memfd: int) -> None:
    """As between containers: neither sees the other's pid. The writer's own pidfd, which it sends, tells the server of its end."""
    command = [*IN_A_PID_NAMESPACE, sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(stage_.path)]
    config = stage_.path.parent / "server.yaml"
    config.write_text("server:\n  reservation_seconds: 0.2\n")
    stage_.undo.enter_context(Child([*command, "--config", str(config)])).expect("serving")
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    inside = [*IN_A_PID_NAMESPACE, sys.executable, "-c", RESERVE_AND_WAIT, str(stage_.path)]
    unshare = stage_.undo.enter_context(Child(inside))
    unshare.expect("reserved")
    writer = int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text())
    os.kill(writer, signal.SIGSTOP)
    eventually(lambda: client.stats().quarantined == 1)
    time.sleep(0.2)  # some ticks
    assert not has_room(client)
    os.kill(writer, signal.SIGKILL)
    eventually(lambda: has_room(client))


@pytest.mark.skipif(not ISOLATES, reason="needs the right to make a pid namespace")
def test_a_server_that_starts_again_in_another_pid_namespace_takes_nobody_for_gone(stage_: Stage, memfd: int) -> None:
    """The journal has the writer's pid of before, which here is nobody's, or somebody else's."""
    server = stage_.server()
    client = offering(stage_, memfd)
    reserving(stage_)
    before = client.epoch
    server.kill()
    command = [*IN_A_PID_NAMESPACE, sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(stage_.path)]
    stage_.undo.enter_context(Child(command)).expect("serving")
    eventually(lambda: client.connected and client.epoch != before and [i.state for i in client.list_segments()] == ["live"])
    time.sleep(0.2)  # some ticks
    assert client.stats().quarantined == 1
    assert not has_room(client)


def test_a_writer_lives_on_where_descriptors_are_too_few_to_look(stage_: Stage, memfd: int) -> None:
    """Exactly one is free: the writer's pidfd takes it, and nothing is left to look at the process with."""
    server = stage_.server(reservation_seconds=0.3)
    writer = stage_.raw()
    assert writer.ask("add_segment", "s0", "host", "host", 4 * KIB, fds=(memfd,))[0] == "added"
    assert writer.ask("reserve", [A, B, C, D], KIB)[1]
    used = server.descriptors()
    first, second = [number for number in range(max(used) + 3) if number not in used][:2]
    assert first < second
    server.descriptors(limit=second)
    eventually(lambda: writer.ask("stats")[7] == 1)
    time.sleep(0.2)  # some ticks
    assert writer.ask("stats")[7] == 1, "quarantined"
    assert writer.ask("reserve", [E], KIB)[3] == [m.Refusal.FULL]


def test_without_descriptors_new_clients_wait_and_cost_nothing(stage_: Stage) -> None:
    server = stage_.server()
    raw = stage_.raw()
    server.descriptors(limit=3)
    waiting = [stage_.raw(hello=False) for _ in range(3)]
    for one in waiting:
        one.send("hello", m.PROTOCOL_VERSION, "host", "host", {})
    time.sleep(0.6)
    assert raw.ask("list_segments") == ["segments", []]
    server.descriptors(limit=1000)
    assert all(one.receive()[0] == "welcome" for one in waiting)
    server.signal(signal.SIGTERM)
    _, said = server.wait()
    assert said.count("no new client can connect") == 1
    assert said.count("\n") < 10


# ---- readers die


def test_a_killed_reader_s_lease_ends_after_its_grace(stage_: Stage, memfd: int) -> None:
    client = pool(stage_, memfd, lease_seconds=60)
    put(client, memfd, A, B, C, D)
    reader = stage_.script(ACQUIRE_AND_WAIT)
    reader.expect("leased 4")
    refused = client.reserve([E], KIB)
    assert refused.slots == [m.Refusal.FULL]
    assert "leased" in refused.reason
    reader.kill()
    eventually(lambda: client.stats().leases == 0)
    assert isinstance(client.reserve([E], KIB).slots[0], m.Location)


def test_memory_outlives_the_worker_that_made_it(stage_: Stage) -> None:
    """A redeployed worker finds its predecessor's segment and the bytes in it: the server alone held them."""
    stage_.server()
    worker = stage_.script(
        WRITER
        + """
from processes import info, make_memfd, write_at
fd = make_memfd(4096)
client.add_segment(info("s0", 4096), fd)
reserved = client.reserve(keys, 1024)
for key, place in zip(keys, reserved.slots):
    write_at(fd, place, (key * 1024)[:1024])
print("stored", client.commit(reserved.reservation)); time.sleep(60)
"""
    )
    worker.expect("stored 4")
    worker.kill()
    successor = stage_.client()
    segment, fd = successor.open_segment(m.SegmentId("s0"))
    stage_.undo.callback(os.close, fd)
    assert segment.nbytes == 4096
    leased = successor.acquire([A, B, C, D])
    assert [read_at(fd, place) for place in leased.locations] == [content(key) for key in (A, B, C, D)]
    assert successor.release(leased.lease)
