"""Instances that share in place, over real connections: what is shown, opened, published and found,
and what goes with whom.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import instance_cases
import msgspec
import pytest
from instance_cases import (
    EACH,
    block_run,
    find,
    instance_id,
    join,
    make_table,
    numbers,
    prompt,
    publish,
    show,
)
from model import FakeClock
from processes import PATIENT, SECONDS, Child, Stage, eventually, hung, info, make_memfd, running
from server_cases import A_TURN, CLIENT, work_of

from vcache_backend.errors import Refused, VCacheError
from vcache_backend.metadata_server import processes, publications
from vcache_backend.metadata_server.instances import InstanceRegistry, SharedInstance, ShownPart
from vcache_backend.metadata_server.processes import Descriptor, Peer, ProcessId
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool.generations import Generations

FULL = m.BlockTable("full")
A, B = instance_id(1), instance_id(2)
JOIN = m.Join(A, instance_cases.NAMESPACE, 64, 1, EACH, instance_cases.FULL)
NOTHING = m.Found(0, 0)
OWN = f"""
{CLIENT}
from instance_cases import instance_id, share
share(client, instance_id(1))
print("shown", flush=True)
"""
OWN_AND_LEAVE_A_CHILD = f"""
{OWN}
if os.fork() == 0:
    os.setsid()
    print("child", os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


@pytest.fixture
def server(alone: Stage) -> Child:
    return alone.server()


@pytest.fixture
def reader(alone: Stage, server: Child) -> Client:
    return alone.client()


def found(client: Client, chunks: int = 3, ranks: int = 1) -> int:
    """How many blocks."""
    return client.find(find(chunks, ranks)).end


def memories(server: Child) -> int:
    """Tables and KV caches that the server keeps."""
    return sum("memfd:vcache-test" in name for name in server.fds())


# ---- what is shown


def test_others_find_and_open_what_is_shown(alone: Stage, server: Child, reader: Client) -> None:
    owner = alone.client()
    join(owner, A)
    show(owner, A)
    assert publish(owner, A, 3) == 12

    there = reader.find(find(5, 1, B))
    assert (there.found, there.end, there.pooled) == (12, 12, b"\0\0\0")
    run = block_run(3)
    here = m.ResidentRun(0, run.blocks, run.generations, 0, A)
    assert there.residents == [here]
    assert owner.find(find(5, 1, A)) == NOTHING
    sent = reader.send_find(find(2, limit=7), SECONDS)
    assert sent.answer().residents == [here.cut(0, 7)]

    joined, (table, *pidfds) = reader.open_instance(A)
    assert joined == m.Joined(64, 1)
    for fd in pidfds:
        assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    described, memory = reader.open_cache(A, 0)
    assert described == instance_cases.shape()
    assert [os.fstat(fd).st_size for fd in (table, memory)] == [2 * 4096, 4 * 64 * 64]
    for fd in (table, memory, *pidfds):
        os.close(fd)
    stats = reader.stats()
    (told,) = stats.instances
    assert msgspec.structs.replace(told, silent=0.0) == m.InstanceStats(
        A.hex(), "host", os.getpid(), 64, 12, namespace=instance_cases.NAMESPACE.hex(), early=True
    )
    assert stats.counters["published"] == 12
    assert stats.counters["resident_hits"] == 3 + 1
    assert memories(server) == 2 + 1, "the server reads the table"

    owner.close()
    eventually(lambda: reader.find(find(5)) == NOTHING)
    assert not reader.stats().instances
    eventually(lambda: not memories(server))
    with pytest.raises(Refused, match="it is not here, or not any more"):
        reader.open_instance(A)


def test_what_clients_have_read_is_seen_while_connected(alone: Stage, reader: Client) -> None:
    def say(client: Client, *reads: m.Reads) -> None:
        client.reads = lambda: list(reads)
        client.list_segments()

    def told() -> list[tuple[Any, ...]]:
        return [(one.instance, one.nbytes, one.reader) for one in reader.stats().reads]

    one, two = (alone.client() for _ in range(2))
    say(one, m.Reads(A, 5, 1))
    say(one, m.Reads(A, 7, 1), m.Reads(B, 0, 2))
    say(two, m.Reads(A, 9, 0))
    assert told() == [(A.hex(), 9, ""), (A.hex(), 7, ""), (B.hex(), 0, "")]
    show(one, B)
    say(one, m.Reads(A, 7, 1))
    assert told() == [(A.hex(), 9, ""), (A.hex(), 7, B.hex())]
    one.close()
    eventually(lambda: told() == [(A.hex(), 9, "")])
    many = [m.Reads(instance_id(number), 1 << 60, 1 << 60) for number in range(m.MAX_OWNERS)]
    with ExitStack() as crowd:
        for _ in range(6):
            say(crowd.enter_context(alone.client()), *many)
        assert len(told()) == 256
    with pytest.raises(Refused):
        say(two, *many, *many)


CONNECTED = """
import pathlib, sys, time
from processes import PATIENT
from vcache_backend.protocol.client import Client
layout = {"model": "llama", "namespace": "00ff"} if len(sys.argv) > 2 else None
with Client(pathlib.Path(sys.argv[1]), PATIENT, "GPU-7", "cuda", layout, name=" ".join(sys.argv[2:])) as client:
    client.require()
    print("connected", flush=True)
    time.sleep(600)
"""
"""A process with a connection. Its arguments: the socket, and the name of an instance, if it is to
say of which it is.
"""


def test_an_instance_that_shares_through_the_pool_is_all_of_its_processes(alone: Stage) -> None:
    """vLLM's scheduler, whose children are the workers; LMCache's workers, all children of one
    process, which say the same name.
    """
    server = alone.server()
    asks = alone.client()

    def connected(*name: str) -> Child:
        child = alone.script(CONNECTED, *name)
        child.expect("connected")
        return child

    with Client(alone.path, PATIENT, layout={"model": "llama", "namespace": "00ff"}):
        worker = connected()
        (one,) = asks.stats().instances
        assert (one.pid, one.device, one.stopped) == (os.getpid(), "GPU-7", 0)
        with worker.stopped():
            assert [one.stopped for one in asks.stats().instances] == [worker.pid]
    for what in ("connects", "disconnects"):
        server.expect(f"an instance of llama, namespace 00ff (pid {os.getpid()} on host) {what}")
    first, second, other = connected(":8000"), connected(":8000"), connected(":8000", "rank", "1")
    named = [(one.pid, one.name) for one in asks.stats().instances]
    assert named == [(first.pid, ":8000"), (other.pid, ":8000 rank 1")]
    with second.stopped():
        assert [one.stopped for one in asks.stats().instances] == [second.pid, 0]


STARTS_AN_INSTANCE = f"""
import os, signal
if os.fork():
    signal.pause()
{CLIENT}
from instance_cases import instance_id, share
share(client, instance_id(int(sys.argv[2])))
print("shown", flush=True)
time.sleep(600)
"""
"""As vLLM's API server, which starts its engine in a process of its own."""


def test_an_instance_whose_api_server_was_killed_is_an_orphan(alone: Stage, reader: Client) -> None:
    """A shell may end before what it has started."""
    program = [sys.executable, "-c", STARTS_AN_INSTANCE.partition("signal.pause()\n")[2]]
    shell = Child(["sh", "-c", '"$@" & wait', "sh", *program, str(alone.path), "2"])
    with alone.script(STARTS_AN_INSTANCE, "1") as api_server, shell:
        for each in (api_server, shell):
            each.expect("shown")
        assert [one.orphan for one in reader.stats().instances] == [0, 0]
        for each in (shell, api_server):
            each.kill()
        orphans = {one.id: one.orphan for one in reader.stats().instances}
        assert orphans == {A.hex(): api_server.pid, B.hex(): 0}


def test_nothing_is_found_before_all_of_an_instance_is_shown(alone: Stage, reader: Client) -> None:
    scheduler, first, second = (alone.client() for _ in range(3))

    def lacks(what: str) -> None:
        assert (found(reader, 2, 2), reader.stats().instances[0].missing) == (0, what)
        for ask in (lambda: reader.open_instance(A), lambda: reader.open_cache(A, 0)):
            with pytest.raises(Refused, match=f"{what} is not here yet"):
                ask()

    show(first, A, 0)
    assert publish(first, A, 2) == 0  # nobody knows what its blocks are yet
    lacks("its scheduler")
    join(scheduler, A, ranks=2)
    assert publish(first, A, 2) == 8
    lacks("rank 1")
    assert reader.stats().instances[0].early
    scheduler.count(asked=256)
    scheduler.list_segments()  # which tells the counts
    assert not reader.stats().instances[0].early
    show(second, A, 1)
    assert publish(second, A, 2, rank=1) == 8
    assert (found(reader, 2, 2), reader.stats().instances[0].missing) == (8, "")
    assert found(reader, 2, 1) == 0
    join(reader, B)
    assert reader.find(find(2, 1, B)).end == 0, "its rank 0 has another part"


def test_of_many_copies_two_are_told_each_of_one_instance(alone: Stage, reader: Client) -> None:
    ids = [instance_id(10 + number) for number in range(4)]
    for instance in ids:
        instance_cases.share(alone.client(), instance, 8)
    firsts = set()
    for _ in range(50):
        first, second = reader.find(find(8)).residents
        assert (first.count, second.count, first.instance != second.instance) == (32, 32, True)
        firsts.add(first.instance)
    assert len(firsts) > 1


def test_blocks_that_the_owner_has_reused_are_left_out(alone: Stage, reader: Client) -> None:
    """At once, and all of them when the owner gives its table up."""
    with alone.client() as owner, closing(Generations(A, 64)) as table:
        owner.join(JOIN, table.fd)
        show(owner, A)
        assert publish(owner, A, 3) == found(reader) == 12
        table.void([7])
        assert found(reader) == 7
        table.give_up()
        assert found(reader) == 0


# ---- who may


def test_nobody_takes_over_an_instance_or_publishes_for_it(alone: Stage, reader: Client) -> None:
    owner = alone.script(OWN + "time.sleep(60)")
    owner.expect("shown")
    with pytest.raises(Refused, match=rf"join {A.hex()}: pid {owner.pid} is this part"):
        join(reader, A)
    with pytest.raises(Refused, match=f"pid {owner.pid} is this part"):
        show(reader, A)
    with pytest.raises(Refused, match="this connection has shown no cache of its rank 0"):
        publish(reader, A, 3)
    with alone.client() as stranger:
        show(stranger, A, 1)  # beyond its ranks: harmless
        with pytest.raises(Refused, match="rank 1 of an instance that joined with 1"):
            publish(stranger, A, 3, rank=1)
    eventually(lambda: reader.stats().clients == 2)
    assert found(reader) == 12
    assert publish(reader, B, 1) == 0


def test_a_process_takes_its_place_beside_its_old_connection(alone: Stage, reader: Client) -> None:
    before, after = alone.client(), alone.client()
    instance_cases.share(before, A)
    show(after, A)
    assert found(reader) == 12
    with pytest.raises(Refused, match="has shown no cache"):
        publish(before, A, 3)
    unsealed = make_memfd(2 * 4096, seals=False)
    with pytest.raises(Refused, match="not sealed against shrinking"):
        after.join(JOIN, unsealed)
    os.close(unsealed)
    assert found(reader) == 12
    join(after, A)
    assert found(reader) == 0  # another table
    assert publish(after, A, 3) == 12
    before.close()
    assert found(reader) == 12


# ---- what goes with whom


def test_a_dead_owners_child_holds_no_instance(alone: Stage, server: Child, reader: Client) -> None:
    owner = alone.script(OWN_AND_LEAVE_A_CHILD)
    child = int(owner.expect("child").split()[1])
    try:
        assert found(reader) == 12
        owner.signal(signal.SIGKILL)
        eventually(lambda: found(reader) == memories(server) == 0)
        os.kill(child, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_who_comes_back_has_what_it_published(alone: Stage, server: Child, reader: Client) -> None:
    """The others need not know of it. Only a fresh table or cache begins anew."""
    scheduler, worker = alone.client(), alone.client(PATIENT)
    join(scheduler, A)
    show(worker, A)
    worker.on_return += [lambda: 1 / 0, lambda: show(worker, A)]  # type: ignore[list-item]
    publish(worker, A, 3)
    with hung(server, worker), pytest.raises(VCacheError):
        worker.stats()
    eventually(lambda: worker.connected and found(reader) == 12)
    assert worker.connections_lost == 1
    show(worker, A, blocks=32)
    show(worker, A)
    assert found(reader) == 0


# ---- what others hold as well


BEHIND = 32
"""Where the chunks of `B` begin."""


def copies(instance: m.InstanceId, *numbers: int) -> list[m.Copies]:
    """News of chunks with these numbers, which `instance` has, too."""
    own, theirs = (0, BEHIND) if instance == B else (BEHIND, 0)
    places = [(4 * at + own, 4 * at + theirs) for at in numbers]
    ends = [(here + EACH - 1, 2, here, there + EACH - 1, 2) for here, there in places]
    return [m.Copies(instance, b"".join(m.COPY.pack(*end) for end in ends))]


def test_two_that_hold_a_chunk_hear_of_each_other_once(
    alone: Stage, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any answer to their schedulers, not to others who use their name."""
    a, b = alone.client(), alone.client()
    for client, name, count, first in ((a, A, 3, 0), (b, B, 2, BEHIND)):
        instance_cases.share(client, name, count, first)
    assert reader.find(find(1, 1, A)).copies == []
    assert a.heartbeat().copies == copies(B, 1, 0)
    assert b.find(find(9, 1, B, start=9)).copies == copies(A, 1, 0)
    assert a.heartbeat().copies == b.heartbeat().copies == []
    publish(b, B, 1, BEHIND + 8, 2)
    show(b, B, layers=1)  # another KV cache
    assert a.heartbeat().copies == []
    assert b.heartbeat().copies == copies(A, 2)
    monkeypatch.setattr(SharedInstance, "MAX_COPIES", 2)
    alone.servers[0].close()
    with running(alone.path):
        a, b = alone.client(), alone.client()
        for client, name, first in ((a, A, 0), (b, B, BEHIND)):
            instance_cases.share(client, name, first=first)
        assert a.heartbeat().copies == copies(B, 1, 0)


def test_a_publication_tells_few_however_many_hold_its_chunks() -> None:
    """Data parallel ranks with one system prompt: a publication that 60 instances hold took the
    server 25 ms."""
    service, size = Service(1, now=FakeClock()), m.MAX_PUBLISHED
    run, me = block_run(size, each=1), Peer(1, ProcessId(7, 8), "host", "host")
    instances, first = service.instances, instance_id(0)
    for one in map(instance_id, range(20)):
        request = m.Join(one, instance_cases.NAMESPACE, 10_000, 1, 1, [FULL])
        instances.join(me, request, [make_table(one, 10_000)])
        instances.of[one].parts[0], instances.of[one].whole = (
            ShownPart(me, Descriptor(os.memfd_create("part"))),
            True,
        )
        publication = m.Publish(one, 0, [run])
        work = work_of(lambda it=publication: instances.publish(me, it))
        assert work <= 2 * A_TURN
        told = {other: instances.copies(other) for other in instances.of}
        while any(map(instances.copies, instances.of)):
            pass
        holders = sum(map(bool, told.values()))
        assert (bool(told[one]), holders <= 5) == (one != first, True)


def test_each_of_many_hears_of_another(alone: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One publication tells only some of them."""
    monkeypatch.setattr(InstanceRegistry, "MAX_NOTED", 1)
    with running(alone.path):
        clients = [(alone.client(), instance_id(number)) for number in (1, 2, 3)]
        for client, name in clients:
            instance_cases.share(client, name, 1)
            client.heartbeat()
        (last, name), silent = clients[2], {A, B}
        for number in range(200):
            show(last, name, layers=1 + number % 2)  # what was published is forgotten
            publish(last, name, 1)
            silent -= {other for client, other in clients[:2] if client.heartbeat().copies}
        assert not silent


# ---- what cannot be


ONE = block_run(1)
RUN = {name: getattr(ONE, name) for name in ONE.__struct_fields__}
UNEQUAL = "B of hashes, numbers and generations"
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"blocks": ONE.blocks[:-1]}, UNEQUAL),
    ({"generations": ONE.generations[:-8]}, UNEQUAL),
    ({"hashes": prompt(2)}, UNEQUAL),
    ({"blocks": numbers(0, 1, 2, 64)}, "block 64 of an instance with 64"),
    ({"generations": instance_cases.counts(2, 2, 3, 2)}, "an odd generation"),
    ({"table": 1}, "table 1 of an instance with 1"),
    ({"table": m.MAX_TABLES}, f"<= {m.MAX_TABLES - 1}"),
    ({"first": -1}, ">= 0"),
]


def test_a_publication_that_does_not_fit_together_is_refused(alone: Stage, reader: Client) -> None:
    raw, table, memory = alone.raw(), make_table(A), make_memfd(4 * 64 * 64)
    tables = msgspec.to_builtins(instance_cases.FULL)
    shown = raw.ask("join", A, instance_cases.NAMESPACE, 64, 1, EACH, tables, fds=(table,))
    assert shown == ["count", 1]
    assert raw.ask("show_cache", A, 0, packed(), fds=(memory,)) == ["count", 1]
    many = [list(RUN.values())] * (m.MAX_PUBLISHED // EACH + 1)
    runs = [([list((RUN | changed).values())], why) for changed, why in MISFITS]
    runs += [(many, "more than 2,048 blocks"), ([[0, b"", b"", 0, b""]] * 2049, "<= 2048")]
    for wrong, why in runs:
        # What is right beside it is not taken either.
        refused = raw.ask("publish", A, 0, [list(RUN.values()), *wrong])
        assert (refused[0], refused[2]) == ("error", False)
        assert why in refused[1]
        assert found(reader) == 0
    assert raw.ask("publish", A, 0, [list(RUN.values())]) == ["count", 4]
    assert found(reader) == 4
    for fd in (table, memory):
        os.close(fd)


def test_a_part_comes_with_one_fd(alone: Stage, server: Child, reader: Client) -> None:
    memory, raw = make_memfd(4 * 64 * 64), alone.raw()
    tables = msgspec.to_builtins(instance_cases.FULL)
    for fds in (0, 2, m.MAX_FDS):
        given = (memory,) * fds
        joins = "join", B, instance_cases.NAMESPACE, 64, 1, EACH, tables
        for asked in (joins, ("show_cache", A, 0, packed())):
            refused = raw.ask(*asked, fds=given)
            assert f"{fds} fds came along; exactly 1 is needed" in refused[1]
            assert not refused[2]
    assert not reader.stats().instances
    eventually(lambda: not memories(server))
    join(reader, A)
    assert raw.ask("show_cache", A, 0, packed(), fds=(memory,)) == ["count", 1]
    _, opened = reader.open_cache(A, 0)
    assert os.fstat(opened).st_ino == os.fstat(memory).st_ino
    assert memories(server) == 1 + 2
    for fd in (memory, opened):
        os.close(fd)
    raw.close()
    eventually(lambda: memories(server) == 2)


def test_without_descriptors_a_cache_waits(alone: Stage, server: Child, reader: Client) -> None:
    """The kernel drops an fd for which there is no room."""
    owner = alone.client()
    server.descriptors(limit=min(server.descriptors()))
    with pytest.raises(Refused, match="0 fds came along; exactly 1 is needed"):
        show(owner, A)
    assert owner.stats().instances == []
    server.expect("no descriptors left (ulimit -n)")
    eventually(lambda: not memories(server))
    server.descriptors(limit=1024)
    show(owner, A)
    assert memories(server) == 1


# ---- bounds


def test_nobody_waits_for_memory_to_be_freed(alone: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many GiB take seconds."""
    freed, close = threading.Event(), os.close

    def closed(fd: int) -> None:
        if fd != table and os.fstat(fd).st_ino == number:
            assert freed.wait(20)
        close(fd)

    with running(alone.path):
        owner, other = alone.client(), alone.client()
        table = make_table(A)
        number = os.fstat(table).st_ino
        owner.join(JOIN, table)
        monkeypatch.setattr(os, "close", closed)
        owner.close()
        eventually(lambda: not other.stats().instances)
        freed.set()
        close(table)


def test_instances_and_their_tables_are_bounded(alone: Stage, reader: Client) -> None:
    with alone.client() as greedy:
        most = InstanceRegistry.MAX_BYTES // (m.MAX_BLOCKS * publications.BLOCK_BYTES)
        for number in range(most):
            join(greedy, instance_id(number), m.MAX_BLOCKS)
        with pytest.raises(Refused, match="no memory for 2,097,152 more blocks"):
            join(greedy, instance_id(99), m.MAX_BLOCKS)
        for number in range(most, 64):
            show(greedy, instance_id(number))
        with pytest.raises(Refused, match="64 instances share in place already"):
            show(reader, instance_id(99))
    eventually(lambda: not reader.stats().instances)
    join(reader, instance_id(99), m.MAX_BLOCKS)


def test_clients_keep_descriptors(
    alone: Stage, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 134 descriptors 12 are for segments and the memory of instances."""
    monkeypatch.setattr(processes, "raise_descriptor_limit", lambda: 134)
    with running(alone.path):
        client = alone.client()
        for rank in range(12):
            show(client, A, rank)
        with pytest.raises(Refused, match="fds of instances are kept; raise"):
            show(client, B)
        with pytest.raises(Refused, match="0 segments and 12 fds of instances are kept"):
            client.add_segment(info("s0", 4096), memfd)


def test_too_long_an_answer_is_cut_and_asked_for_again(alone: Stage, reader: Client) -> None:
    """Two copies of 8,000 blocks take 192 kB."""
    each, chunks = 16, 500
    for number in (1, 2):
        owner, instance = alone.client(), instance_id(number)
        join(owner, instance, blocks=each * chunks, each=each)
        show(owner, instance)
        assert publish(owner, instance, chunks, each=each) == each * chunks
    sent = reader.send_find(find(chunks, each=each), SECONDS)
    part = sent.answer()
    assert part.cut
    assert each * chunks // 2 < part.found == part.end < each * chunks
    assert part.found % each == 0
    whole = reader.find(find(chunks, each=each, limit=each * chunks - 1))
    assert (whole.found, whole.end, whole.cut) == (each * chunks, each * chunks - 1, False)
    assert len(whole.pooled) == chunks
    runs = sorted(whole.residents, key=lambda run: (run.instance, run.first))
    spans = [(run.first, run.stop) for run in runs]
    assert spans == [(0, part.found), (part.found, each * chunks - 1)] * 2
    assert b"".join(run.blocks for run in runs[:2]) == numbers(*range(each * chunks - 1))


def test_more_hashes_than_a_question_has_are_asked_for_in_parts(
    alone: Stage, reader: Client
) -> None:
    """But of several block tables only the first count: a hit needs all of them at one end."""
    each, chunks = 16, m.MAX_HASHES // 16 + 3
    several = [FULL, m.BlockTable("window", 1, 4)]
    for tables, count in (([FULL], each * chunks), (several, m.MAX_HASHES)):
        with alone.client() as owner:
            join(owner, A, blocks=2 * each * chunks, each=each, tables=tables)
            show(owner, A)
            for table in range(len(tables)):
                first = table * each * chunks
                taken = publish(owner, A, chunks, first, each=each, table=table)
                assert taken == each * chunks
            join(reader, B, tables=tables, each=each)
            answer = reader.find(find(chunks, instance=B, each=each))
            assert (answer.found, answer.end) == (count, count)
            last = 4 if tables is several else count - m.MAX_HASHES
            assert [run.count for run in answer.residents] == [m.MAX_HASHES, last]
            sent = reader.send_find(find(chunks, instance=B, each=each), SECONDS)
            assert (sent is None) == (len(tables) == 1)
        eventually(lambda: len(reader.stats().instances) == 1)


def packed() -> list[Any]:
    """The shape of a KV cache, as it is sent."""
    return msgspec.to_builtins(instance_cases.shape())
