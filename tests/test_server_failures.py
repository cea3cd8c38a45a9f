"""What happens when processes die, hang and come back. Real processes, real signals; nothing waits longer than it says."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model import chunk_key
from processes import PATIENT, QUICK, SECONDS, Child, Stage, eventually, info, make_memfd, read_at, stage, write_at

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.server import Server

KIB = 1 << 10
A, B, C, D, E = (chunk_key(n) for n in range(5))
SLACK = 0.5
"""What two busy cores may add to a deadline."""

WRITER = """
import os, sys, time
from pathlib import Path
from vcache_backend.config import ClientConfig
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.endpoint import beside
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


@pytest.fixture
def stage_(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as made:
        yield made


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = make_memfd(4 * KIB)
    yield fd
    os.close(fd)


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


def timed(call: Callable[[], Any]) -> tuple[float, VCacheError]:
    started = time.perf_counter()
    with pytest.raises(VCacheError) as raised:
        call()
    return time.perf_counter() - started, raised.value


def has_room(client: Client) -> bool:
    """Could four chunks be reserved now? Leaves nothing behind."""
    reserved = client.reserve([chunk_key(n) for n in range(100, 104)], KIB)
    if reserved.reservation:
        client.abort(reserved.reservation)
    return all(isinstance(slot, m.Location) for slot in reserved.slots)


# ---- the server is absent, dies, comes back


def test_a_wrong_socket_path_costs_nothing_and_is_named(stage_: Stage) -> None:
    started = time.perf_counter()
    client = stage_.client(QUICK)
    assert time.perf_counter() - started < QUICK.connect_seconds + SLACK
    _, error = timed(lambda: client.lookup([A]))
    assert str(stage_.path) in str(error)


def test_a_killed_server_is_noticed_at_once(stage_: Stage) -> None:
    server = stage_.server()
    client = stage_.client(QUICK)
    assert client.lookup([A]) == 0
    server.kill()
    took, error = timed(lambda: client.lookup([A]))
    assert isinstance(error, ServerUnavailable)
    assert took < QUICK.request_seconds
    assert statistics.median(timed(lambda: client.lookup([A]))[0] for _ in range(100)) < 1e-3


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


def test_contents_survive_ten_restarts(stage_: Stage, memfd: int) -> None:
    client = stage_.client(QUICK)
    stored: list[m.ChunkKey] = []
    for number in range(10):
        server = stage_.server()
        eventually(lambda: client.connected)
        if not stored:
            client.offer(info("s0", 4 * KIB), memfd)
        eventually(lambda: client.lookup(stored[-4:]) == len(stored[-4:]))
        time.sleep(m.GRACE_SECONDS)  # before that a server that started again reserves nothing
        put(client, memfd, chunk_key(number))
        stored.append(chunk_key(number))
        server.kill()
        eventually(lambda: not client.connected)
    stage_.server()
    eventually(lambda: client.connected and client.contains(stored) == [False] * 6 + [True] * 4)


@pytest.mark.parametrize("journal", [True, False])
def test_a_slot_leased_from_a_killed_server_is_not_handed_out_before_the_grace_of_the_lease_is_over(
    stage_: Stage, memfd: int, journal: bool
) -> None:
    """The next server starts at once, in this process, and knows the leased chunk's slot, if at all, as one to evict."""
    server = stage_.server(journal=journal)
    writer, reader = stage_.client(QUICK), stage_.client(QUICK)
    writer.offer(info("s0", 4 * KIB), memfd)
    put(writer, memfd, A, B, C, D)
    asked = time.monotonic()
    leased = reader.acquire([A, B, C, D])
    server.kill()
    again = Server(ServerConfig(socket=str(stage_.path), journal=journal))
    running = threading.Thread(target=again.run)
    running.start()

    def handed_out() -> bool:
        try:
            return bool(writer.reserve([E], KIB).reservation)
        except ServerUnavailable:
            return False

    try:
        eventually(handed_out)
        assert time.monotonic() > asked + m.GRACE_SECONDS
        assert reader.release(leased.lease) is False
    finally:
        again.stop()
        running.join(SECONDS)
    assert not running.is_alive()


def test_without_a_journal_a_restart_is_cold(stage_: Stage, memfd: int) -> None:
    server = stage_.server(journal=False)
    client = stage_.client(QUICK)
    client.offer(info("s0", 4 * KIB), memfd)
    put(client, memfd, A)
    server.kill()
    eventually(lambda: not client.connected)
    stage_.server(journal=False)
    eventually(lambda: client.connected and len(client.list_segments()) == 1)
    assert client.lookup([A]) == 0


def test_a_damaged_journal_costs_contents_but_not_the_start(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    client = stage_.client(QUICK)
    client.offer(info("s0", 4 * KIB), memfd)
    put(client, memfd, A)
    put(client, memfd, B)
    server.kill()
    journal = beside(stage_.path, ".journal")
    journal.write_bytes(journal.read_bytes()[:-3] + b"\xc1\xc1\xc1")
    before = client.epoch
    stage_.server()
    eventually(lambda: client.connected and client.epoch != before)
    eventually(lambda: client.lookup([A]) == 1)
    assert client.lookup([B]) == 0


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
    client = stage_.client(QUICK)
    client.offer(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_WAIT)
    writer.expect("reserved")
    server.kill()
    eventually(lambda: not client.connected)
    stage_.server()
    eventually(lambda: client.connected and client.list_segments() and client.list_segments()[0].state == "live")
    assert not has_room(client)
    assert client.stats().quarantined == 1
    writer.kill()
    eventually(lambda: has_room(client))


# ---- the server hangs


def test_every_call_to_a_hung_server_ends_by_its_deadline_and_the_next_ones_cost_nothing(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    seconds = {"request": QUICK.request_seconds, "control": QUICK.control_seconds}
    calls: list[tuple[str, Callable[[Client], Any]]] = [
        ("request", lambda client: client.lookup([A])),
        ("request", lambda client: client.reserve([A], KIB)),
        ("request", lambda client: client.acquire([A])),
        ("request", lambda client: client.commit(1)),
        ("request", lambda client: client.release(1)),
        ("control", lambda client: client.stats()),
        ("control", lambda client: client.add_segment(info("s0", 4 * KIB), memfd)),
    ]
    clients = [stage_.client(QUICK, reconnect=False) for _ in calls]
    with server.stopped():
        for client, (kind, call) in zip(clients, calls, strict=True):
            took, error = timed(lambda call=call, client=client: call(client))
            assert isinstance(error, ServerTimeout)
            assert took < seconds[kind] + SLACK
            assert statistics.median(timed(lambda client=client: client.lookup([A]))[0] for _ in range(100)) < 1e-3


def test_while_the_background_thread_tries_again_calls_still_cost_nothing(stage_: Stage) -> None:
    """A hung server accepts connections and never says welcome: each attempt takes its full time, the callers none of it."""
    server = stage_.server()
    client = stage_.client(QUICK)
    client.lookup([A])
    with server.stopped():
        timed(lambda: client.lookup([A]))
        took = []
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            took.append(timed(lambda: client.lookup([A]))[0])
            time.sleep(0.001)
        assert statistics.median(took) < 1e-3
        assert max(took) < QUICK.request_seconds / 2
    eventually(lambda: client.connected)
    assert client.lookup([A]) == 0


def test_a_connection_to_a_hung_server_is_given_up_in_time(stage_: Stage) -> None:
    server = stage_.server()
    with server.stopped():
        started = time.perf_counter()
        client = stage_.client(QUICK, reconnect=False)
        assert time.perf_counter() - started < QUICK.connect_seconds + SLACK
        assert not client.connected


def test_a_request_to_a_hung_server_larger_than_the_socket_s_buffer_ends_in_time(stage_: Stage) -> None:
    server = stage_.server()
    client = stage_.client(QUICK, reconnect=False)
    with server.stopped():
        took, error = timed(lambda: client.lookup([A] * 60_000))
        assert isinstance(error, ServerTimeout)
        assert took < QUICK.request_seconds + SLACK


def test_closing_a_client_of_a_hung_server_ends_in_time(stage_: Stage) -> None:
    server = stage_.server()
    client = Client(stage_.path, QUICK)
    with server.stopped():
        timed(lambda: client.lookup([A]))
        started = time.perf_counter()
        client.close()
        assert time.perf_counter() - started < QUICK.connect_seconds + QUICK.control_seconds + SLACK


# ---- writers die


def test_a_writer_killed_between_reserve_and_commit_gives_its_slots_back(stage_: Stage, memfd: int) -> None:
    stage_.server()
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_WAIT)
    writer.expect("reserved")
    assert not has_room(client)
    writer.signal(signal.SIGKILL)  # not reaped: a zombie writes nothing
    eventually(lambda: has_room(client))
    assert client.lookup([A]) == 0
    assert client.stats().quarantined == 0


def test_a_writer_that_only_hangs_up_keeps_its_slots_until_it_is_gone(stage_: Stage, memfd: int) -> None:
    stage_.server()
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_HANG_UP)
    writer.expect("hung up")
    eventually(lambda: client.stats().quarantined == 1)
    time.sleep(1.2)
    assert not has_room(client)
    assert client.reserve([A], KIB).slots == [m.Refusal.FULL]
    writer.kill()
    eventually(lambda: has_room(client))


def test_a_writer_that_is_stopped_keeps_its_slots_past_its_reservation(stage_: Stage, memfd: int) -> None:
    """A stopped process has not stopped its GPU's copies: only quarantine_seconds or its end give the slots back."""
    stage_.server(reservation_seconds=0.2)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_WAIT)
    writer.expect("reserved")
    writer.signal(signal.SIGSTOP)
    eventually(lambda: client.stats().quarantined == 1)
    assert not has_room(client)
    writer.kill()
    eventually(lambda: has_room(client))


def test_a_quarantine_ends_after_its_time(stage_: Stage, memfd: int) -> None:
    stage_.server(quarantine_seconds=0.5)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_HANG_UP)
    writer.expect("hung up")
    eventually(lambda: has_room(client))
    assert writer.process.poll() is None


def test_a_dead_writer_s_slots_come_back_though_its_child_keeps_the_connection_open(stage_: Stage, memfd: int) -> None:
    """The connection ends only with the orphan that inherited it, so expiry voids the reservation; the writer is long gone by then."""
    stage_.server(reservation_seconds=0.5)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    writer = stage_.script(RESERVE_AND_LEAVE_A_CHILD)
    orphan = int(writer.expect("orphan").split()[1])
    try:
        writer.process.wait(10)
        eventually(lambda: has_room(client))
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)


# ---- readers die


def test_a_killed_reader_s_lease_ends_after_its_grace(stage_: Stage, memfd: int) -> None:
    stage_.server(lease_seconds=60)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    put(client, memfd, A, B, C, D)
    reader = stage_.script(ACQUIRE_AND_WAIT)
    reader.expect("leased 4")
    refused = client.reserve([E], KIB)
    assert refused.slots == [m.Refusal.FULL]
    assert "leased" in refused.reason
    reader.kill()
    eventually(lambda: client.stats().leases == 0, 2)
    assert isinstance(client.reserve([E], KIB).slots[0], m.Location)


def test_a_pool_full_of_leased_chunks_says_full_until_a_lease_runs_out(stage_: Stage, memfd: int) -> None:
    stage_.server(lease_seconds=1)
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    put(client, memfd, A, B, C, D)
    leased = client.acquire([A, B, C, D])
    assert client.reserve([E], KIB).slots == [m.Refusal.FULL]
    assert client.lookup([A, B, C, D]) == 4
    eventually(lambda: isinstance(client.reserve([E], KIB).slots[0], m.Location))
    assert client.release(leased.lease) is False


def test_a_chunk_larger_than_every_segment_is_refused_and_evicts_nothing(stage_: Stage, memfd: int) -> None:
    stage_.server()
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    put(client, memfd, A, B, C, D)
    refused = client.reserve([E], 8 * KIB)
    assert refused.slots == [m.Refusal.TOO_LARGE]
    assert "set pool.segment_bytes >= 8192" in refused.reason
    assert client.lookup([A, B, C, D]) == 4


# ---- nothing is left


def test_the_death_of_a_server_leaves_no_fd_and_no_memory_behind(stage_: Stage) -> None:
    server = stage_.server()
    client = stage_.client(QUICK)
    fd = make_memfd(4 * KIB)
    client.add_segment(info("s0", 4 * KIB), fd)
    before = _open_fds()
    server.kill()
    timed(lambda: client.lookup([A]))
    assert _open_fds() < before
    os.close(fd)
    assert not [name for name in _open_fd_names() if "vcache-test" in name]
    assert not Path(f"/proc/{server.pid}").exists()


def test_a_server_lets_go_of_dead_processes(stage_: Stage, memfd: int) -> None:
    server = stage_.server()
    client = stage_.client()
    client.add_segment(info("s0", 4 * KIB), memfd)
    before = len(server.fds())
    for _ in range(3):
        writer = stage_.script(RESERVE_AND_WAIT)
        writer.expect("reserved")
        writer.kill()
        eventually(lambda: has_room(client))
    eventually(lambda: len(server.fds()) <= before)


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


def _open_fd_names() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return names


def _open_fds() -> int:
    return len(_open_fd_names())


def test_a_child_of_these_tests_dies_with_its_context() -> None:
    with Child(["sleep", "60"]) as child:
        pid = child.pid
    assert not Path(f"/proc/{pid}").exists()
