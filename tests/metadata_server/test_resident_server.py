"""Instances that share in place, over real connections: what is shown, opened, published and found,
and what goes with whom.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from typing import Any

import instance_cases
import msgspec
import pytest
from instance_cases import EACH, chunk_blocks, instance_id, join, keys, numbers, publish, show
from processes import PATIENT, SECONDS, Child, Stage, eventually, hung, info, make_memfd, running
from server_cases import CLIENT

from vcache_backend.errors import Refused, VCacheError
from vcache_backend.metadata_server import instances, processes
from vcache_backend.metadata_server import residents as residence
from vcache_backend.metadata_server import residents as resident_chunks
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

A, B = instance_id(1), instance_id(2)
NOTHING = m.Found(b"")
COUNTS = instance_cases.chunk_generations(2)
"""Generations of a chunk."""
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


def found(client: Client, count: int = 3, ranks: int = 1) -> int:
    return len(client.find(m.Find(keys(count), ranks)).pooled)


def memories(server: Child) -> int:
    """Tables and KV caches that the server keeps."""
    return sum("memfd:vcache-test" in name for name in server.fds())


# ---- what is shown


def test_others_find_and_open_what_is_shown(alone: Stage, server: Child, reader: Client) -> None:
    owner = alone.client()
    join(owner, A)
    show(owner, A, regions=2)
    assert publish(owner, A, keys(3)) == 3

    there = reader.find(m.Find(keys(5), 1, B))
    assert there.pooled == b"\0\0\0"
    blocks = [chunk_blocks(4 * at) for at in range(3)]
    here = m.ResidentRun(0, 3, A, b"".join(blocks), 3 * COUNTS)
    assert there.residents == [here]
    assert owner.find(m.Find(keys(5), 1, A)) == NOTHING
    sent = reader.send_find(m.Find(keys(2)), SECONDS)
    assert sent.answer().residents == [here.cut(0, 2)]

    joined, (table, *pidfds) = reader.open_instance(A)
    assert joined == m.Joined(64, 1, EACH)
    assert [processes.is_pidfd(fd, os.getpid()) for fd in pidfds] == [True, True]
    described, regions = reader.open_cache(A, 0)
    assert described == instance_cases.shape(64, 2)
    sizes = [os.fstat(fd).st_size for fd in (table, *regions)]
    assert sizes == [4096 + 64 * 8, 4 * 64 * 64, 4 * 64 * 64]
    for fd in (table, *regions, *pidfds):
        os.close(fd)
    stats = reader.stats()
    (told,) = stats.instances
    assert msgspec.structs.replace(told, silent=0.0) == m.InstanceStats(
        A.hex(), "host", os.getpid(), 64, 3, namespace=instance_cases.NAMESPACE.hex(), early=True
    )
    assert stats.counters["published"] == 3
    assert stats.counters["resident_hits"] == 5
    assert memories(server) == 3

    owner.close()
    eventually(lambda: reader.find(m.Find(keys(5))) == NOTHING)
    assert not reader.stats().instances
    eventually(lambda: not memories(server))
    with pytest.raises(Refused, match="it is not here, or not any more"):
        reader.open_instance(A)


def test_what_clients_have_read_is_seen_while_connected(alone: Stage, reader: Client) -> None:
    def say(client: Client, *reads: m.Reads) -> None:
        client.reads = lambda: list(reads)
        client.list_segments()

    one, two = (alone.client() for _ in range(2))
    say(one, m.Reads(A, 5, 1))
    say(one, m.Reads(A, 7, 1), m.Reads(B, 0, 2))
    say(two, m.Reads(A, 9, 0))
    rows = [(A.hex(), 9, 0), (A.hex(), 7, 1), (B.hex(), 0, 2)]
    assert reader.stats().reads == [m.ReadStats(os.getpid(), "host", *row) for row in rows]
    assert {row.reader for row in reader.stats().reads} == {""}
    show(one, B)
    say(one, m.Reads(A, 7, 1))
    assert [(row.nbytes, row.reader) for row in reader.stats().reads] == [(9, ""), (7, B.hex())]
    one.close()
    eventually(lambda: [row.nbytes for row in reader.stats().reads] == [9])
    many = [m.Reads(instance_id(number), 1 << 60, 1 << 60) for number in range(m.MAX_OWNERS)]
    with ExitStack() as crowd:
        for _ in range(6):
            say(crowd.enter_context(alone.client()), *many)
        assert len(reader.stats().reads) == instances.MAX_READS
    with pytest.raises(Refused):
        say(two, *many, *many)


CONNECTED = """
import pathlib, sys, time
from vcache_backend.config import ClientConfig
from vcache_backend.protocol.client import Client
layout = {"model": "llama", "namespace": "00ff"} if len(sys.argv) > 2 else None
with Client(pathlib.Path(sys.argv[1]), ClientConfig(), "GPU-7", "cuda", layout, name=" ".join(sys.argv[2:])) as client:
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
    assert publish(first, A, keys(2)) == 0  # nobody knows what its blocks are yet
    lacks("its scheduler")
    join(scheduler, A, ranks=2)
    assert publish(first, A, keys(2)) == 2
    lacks("rank 1")
    assert reader.stats().instances[0].early
    scheduler.count(asked=256)
    eventually(lambda: not reader.stats().instances[0].early)
    show(second, A, 1, regions=2)
    assert publish(second, A, keys(2, rank=1)) == 2
    assert (found(reader, 2, 2), reader.stats().instances[0].missing) == (2, "")
    assert found(reader, 2, 1) == 0


def test_of_many_copies_two_are_told_each_of_one_instance(alone: Stage, reader: Client) -> None:
    owners = [alone.client() for _ in range(4)]
    ids = [instance_id(10 + number) for number in range(4)]
    for owner, instance in zip(owners, ids, strict=True):
        instance_cases.share(owner, instance, 8)
    firsts = set()
    for _ in range(50):
        there = reader.find(m.Find(keys(8)))
        assert [(run.first, run.chunks) for run in there.residents] == [(0, 8)] * 2
        assert len({run.instance for run in there.residents}) == 2
        firsts.add(there.residents[0].instance)
    assert len(firsts) > 1


# ---- who may


def test_nobody_takes_over_an_instance_or_publishes_for_it(alone: Stage, reader: Client) -> None:
    owner = alone.script(OWN + "time.sleep(60)")
    owner.expect("shown")
    with pytest.raises(Refused, match=rf"join {A.hex()}: pid {owner.pid} is this part"):
        join(reader, A)
    with pytest.raises(Refused, match=f"pid {owner.pid} is this part"):
        show(reader, A)
    with pytest.raises(Refused, match="this connection has shown no cache of its rank 0"):
        publish(reader, A, keys(3), sequence=9)
    with pytest.raises(Refused, match="this connection does not belong to it"):
        reader.retract(A, 100)
    show(reader, A, 1)  # beyond its ranks: harmless
    with pytest.raises(Refused, match="rank 1 of an instance that joined with 1"):
        publish(reader, A, keys(3, rank=1))
    with pytest.raises(Refused, match="this connection does not belong to it"):
        reader.retract(A, 100)
    assert found(reader) == 3
    assert publish(reader, B, keys(1)) == reader.retract(B, 1) == 0


def test_a_process_takes_its_place_beside_its_old_connection(alone: Stage, reader: Client) -> None:
    before, after = alone.client(), alone.client()
    instance_cases.share(before, A)
    show(after, A)
    assert found(reader) == 3
    with pytest.raises(Refused, match="has shown no cache"):
        publish(before, A, keys(3))
    join(after, A)
    assert found(reader) == 0  # another table
    assert publish(after, A, keys(3)) == 3
    before.close()
    assert found(reader) == 3


# ---- what goes with whom


def test_a_dead_owners_child_holds_no_instance(alone: Stage, server: Child, reader: Client) -> None:
    owner = alone.script(OWN_AND_LEAVE_A_CHILD)
    child = int(owner.expect("child").split()[1])
    try:
        assert found(reader) == 3
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
    publish(worker, A, keys(3))
    with hung(server, worker), pytest.raises(VCacheError):
        worker.stats()
    eventually(lambda: worker.connected and found(reader) == 3)
    assert worker.connections_lost == 1
    show(worker, A, blocks=32)
    show(worker, A)
    assert found(reader) == 0


# ---- resets


def test_a_reset_forgets_what_was_computed_before_it(alone: Stage, reader: Client) -> None:
    owner = alone.client()
    join(owner, A)
    show(owner, A)
    publish(owner, A, keys(3), sequence=5)
    assert owner.retract(A, 5) == 0
    assert owner.retract(A, 6) == 3
    assert (found(reader), publish(owner, A, keys(3), sequence=5)) == (0, 0)
    assert publish(owner, A, keys(3), sequence=6) == 3
    assert reader.clear(b"elsewher") == 0
    assert found(reader) == 3
    assert reader.clear(instance_cases.NAMESPACE, reset=True) == 3
    assert found(reader) == 0
    # computed before, told after
    assert publish(owner, A, keys(3), sequence=7) == found(reader) == 0
    epoch = owner.listen(A).epoch
    assert publish(owner, A, keys(3), sequence=7, epoch=epoch) == found(reader) == 3
    told = [reader.find(m.Find(keys(3))), reader.find(m.Find(keys(1))), reader.present(keys(1))]
    assert {one.epoch for one in told} == {epoch} != {0}
    with pytest.raises(Refused, match="this connection has shown no generations of it"):
        reader.listen(A)


def test_a_retraction_looks_at_the_newest(alone: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before are unknown from then on, and make way."""
    monkeypatch.setattr(residence, "RETRACT_LOOKS", 1)
    with running(alone.path):
        owner, reader = alone.client(), alone.client()
        instance_cases.share(owner, A, 0)
        for at in range(4):
            publish(owner, A, keys(1, start=at), first=4 * at, sequence=5 + at // 2)
        assert owner.retract(A, 6) == 3
        there = [len(reader.find(m.Find(keys(1, start=at))).pooled) for at in range(4)]
        assert there == [0, 0, 0, 1]
        assert publish(owner, A, keys(3), sequence=6) == found(reader) == 3


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
    assert reader.find(m.Find(keys(1), 1, A)).copies == []
    assert a.listen(A).copies == copies(B, 1, 0)
    assert b.find(m.Find(keys(9, start=9), 1, B)).copies == copies(A, 1, 0)
    assert a.listen(A).copies == b.listen(B).copies == []
    publish(b, B, keys(1, start=2), first=BEHIND + 8, sequence=2)
    b.retract(B, 3)
    assert a.listen(A).copies == []
    assert b.listen(B).copies == copies(A, 2)
    monkeypatch.setattr(residence, "MAX_COPIES", 2)
    alone.servers[0].close()
    with running(alone.path):
        a, b = alone.client(), alone.client()
        for client, name, first in ((a, A, 0), (b, B, BEHIND)):
            instance_cases.share(client, name, first=first)
        assert a.listen(A).copies == copies(B, 1, 0)


def test_each_of_many_hears_of_another(alone: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One publication tells only some of them."""
    monkeypatch.setattr(resident_chunks, "MAX_NOTED", 1)
    with running(alone.path):
        clients = [(alone.client(), instance_id(number)) for number in (1, 2, 3)]
        for client, name in clients:
            instance_cases.share(client, name, 1)
            client.listen(name)
        (last, name), silent = clients[2], {A, B}
        for sequence in range(2, 200):
            publish(last, name, keys(1), sequence=sequence)
            silent -= {other for client, other in clients[:2] if client.listen(other).copies}
        assert not silent


# ---- what cannot be


UNEQUAL = "of numbers and generations for"
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"blocks": chunk_blocks(0)[:-1]}, UNEQUAL),
    ({"generations": COUNTS[:-8]}, UNEQUAL),
    ({"blocks": chunk_blocks(0, 2), "generations": 2 * COUNTS}, UNEQUAL),
    ({"blocks": numbers(0, 1, 2, 64)}, "block 64 of an instance with 64"),
    ({"keys": [b"elsewher" + bytes(18)]}, "keys not of namespace"),
    ({"sequence": -1}, ">= 0"),
    ({"keys": keys(m.MAX_PUBLISHED + 1)}, f"<= {m.MAX_PUBLISHED}"),
]


def test_a_publication_that_does_not_fit_together_is_refused(alone: Stage, reader: Client) -> None:
    raw, table, memory = alone.raw(), instance_cases.make_table(64), make_memfd(4 * 64 * 64)
    assert raw.ask("join", A, instance_cases.NAMESPACE, 64, 1, EACH, fds=(table,)) == ["count", 1]
    assert raw.ask("show_cache", A, 0, packed(), fds=(memory,)) == ["count", 1]
    good = {"instance": A, "sequence": 1, "keys": keys(1), "blocks": chunk_blocks(0)}
    good |= {"generations": COUNTS}
    mixed: dict[str, Any] = {"keys": [*keys(1), *keys(1, rank=1)], "blocks": chunk_blocks(0, 2)}
    mixed |= {"generations": 2 * COUNTS}
    for changed, why in [*MISFITS, (mixed, "keys not of namespace")]:
        refused = raw.ask("publish", *(good | changed).values())
        assert (refused[0], refused[2]) == ("error", False)
        assert why in refused[1]
        assert found(reader) == 0
    assert raw.ask("publish", *good.values()) == ["count", 1]
    assert found(reader) == 1
    for fd in (table, memory):
        os.close(fd)


def test_a_cache_comes_with_one_fd_a_region(alone: Stage, server: Child, reader: Client) -> None:
    memory, raw, most = make_memfd(4 * 64 * 64), alone.raw(), m.MAX_REGIONS
    refused = raw.ask("join", B, instance_cases.NAMESPACE, 64, 1, EACH)
    assert "0 fds came along; exactly 1 is needed" in refused[1]
    for regions, fds in ((2, 1), (2, 3), (most, most - 1)):
        refused = raw.ask("show_cache", A, 0, packed(regions), fds=(memory,) * fds)
        assert f"{fds} fds came along; its {regions} regions need one each" in refused[1]
        assert not refused[2]
    assert not reader.stats().instances
    eventually(lambda: not memories(server))
    join(reader, A)
    shown = raw.ask("show_cache", A, 0, packed(most), fds=(memory,) * most)
    assert shown == ["count", most]
    described, fds = reader.open_cache(A, 0)
    number = os.fstat(memory).st_ino
    assert (len(described.regions), {os.fstat(fd).st_ino for fd in fds}) == (most, {number})
    assert (len(fds), memories(server)) == (most, most + 1)
    for fd in (memory, *fds):
        os.close(fd)
    raw.close()
    eventually(lambda: memories(server) == 1)


def test_without_descriptors_a_cache_waits(alone: Stage, server: Child, reader: Client) -> None:
    """The kernel hands over as many fds as there is room for, and drops the others."""
    owner = alone.client()
    server.descriptors(limit=max(server.descriptors()) + 3)
    with pytest.raises(Refused, match="[2-7] fds came along; its 8 regions need one each"):
        show(owner, A, regions=8)
    assert owner.stats().instances == []
    server.expect("no descriptors left (ulimit -n)")
    eventually(lambda: not memories(server))
    server.descriptors(limit=1024)
    show(owner, A, regions=8)
    assert memories(server) == 8


def test_unread_answers_use_up_no_descriptors(alone: Stage, server: Child, reader: Client) -> None:
    owner = alone.client()
    join(owner, A)
    show(owner, A)
    for fd in reader.open_instance(A)[1]:
        os.close(fd)
    raws = [alone.raw() for _ in range(8)]
    before = len(server.descriptors())
    for raw in raws:
        raw.send("open_instance", A)
        raw.send("open_cache", A, 0)
    for fd in reader.open_cache(A, 0)[1]:
        os.close(fd)
    # Fewer where one of a connection was just being closed.
    assert len(server.descriptors()) <= before
    for raw in raws:
        assert [(raw.receive() or ["none"])[0] for _ in range(2)] == ["joined", "cache"]


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
        table = instance_cases.make_table(64)
        number = os.fstat(table).st_ino
        owner.join(A, instance_cases.NAMESPACE, 64, 1, EACH, table)
        monkeypatch.setattr(os, "close", closed)
        owner.close()
        eventually(lambda: not other.stats().instances)
        freed.set()
        close(table)


def test_instances_and_their_tables_are_bounded(alone: Stage, reader: Client) -> None:
    with alone.client() as greedy:
        for number in range(3):
            join(greedy, instance_id(number), m.MAX_BLOCKS)
        with pytest.raises(Refused, match="no memory for 2,097,152 more blocks"):
            join(greedy, instance_id(11), m.MAX_BLOCKS)
        for number in range(3, instances.MAX_INSTANCES):
            show(greedy, instance_id(number))
        with pytest.raises(Refused, match="64 instances share in place already"):
            show(reader, instance_id(99))
    eventually(lambda: not reader.stats().instances)
    join(reader, instance_id(11), m.MAX_BLOCKS)


def test_clients_keep_descriptors(
    alone: Stage, memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 134 descriptors 12 are for segments and the memory of instances."""
    monkeypatch.setattr(processes, "raise_descriptor_limit", lambda: 134)
    with running(alone.path):
        client = alone.client()
        show(client, A, regions=12)
        with pytest.raises(Refused, match="fds of instances are kept; raise"):
            show(client, B, regions=1)
        with pytest.raises(Refused, match="0 segments and 12 fds of instances are kept"):
            client.add_segment(info("s0", 4096), memfd)


def test_too_long_an_answer_is_cut_and_asked_for_again(alone: Stage, reader: Client) -> None:
    """Three hundred chunks of 64 blocks take 230 kB."""
    owner, each, count = alone.client(), 64, 300
    join(owner, A, blocks=each * count, each=each)
    show(owner, A)
    where = chunk_blocks(0, count, each), instance_cases.chunk_generations(2, count, each)
    assert owner.publish(m.Publish(A, 1, keys(count), *where)) == count
    sent = reader.send_find(m.Find(keys(count)), SECONDS)
    part = sent.answer()
    assert part.cut
    assert 200 < len(part.pooled) < count
    whole = reader.find(m.Find(keys(count)))
    assert (len(whole.pooled), whole.cut) == (count, False)
    assert [(run.first, run.instance) for run in whole.residents] == [(0, A), (len(part.pooled), A)]
    assert b"".join(run.blocks for run in whole.residents) == chunk_blocks(0, count, each)


def packed(regions: int = 1) -> list[Any]:
    """The shape of a KV cache, as it is sent."""
    return msgspec.to_builtins(instance_cases.shape(regions=regions))
