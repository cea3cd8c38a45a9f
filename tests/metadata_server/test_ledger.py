"""The ledger: what survives the server's death at any moment, who can write it, and who is
believed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from model import FakeClock, chunk_key

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import ledger as ledgers
from vcache_backend.metadata_server import records as r
from vcache_backend.metadata_server.ledger import Damaged, EarlierLedger, Ledger
from vcache_backend.metadata_server.pool.contents import Contents
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.protocol.messages import ChunkKey, Location, SegmentId, SegmentInfo

KIB = 1 << 10
S0, S1 = SegmentId("s0"), SegmentId("s1")
WRITER = r.ProcessId(11, 5)
CLIENT = Peer(1, WRITER, "gpu-0", "cuda")
EPOCH, HEIR = 77, 78
NOBODY = 65534
A, B, C = (chunk_key(n) for n in range(3))
PLACE = [Location(S0, at * KIB, KIB, 100 + at) for at in range(8)]
HISTORY: list[r.Record] = [
    r.SegmentAdded(S0, "gpu-0", "cuda", 8 * KIB),
    r.Held(1, WRITER, {A: PLACE[0], B: PLACE[1]}),
    r.Published(1),
    r.Held(2, WRITER, {C: PLACE[2]}),
]


def state_of(records: list[r.Record]) -> r.LedgerState:
    state = r.LedgerState()
    for record in records:
        state.apply(record)
    return state


def compacts_nothing(record: r.Record) -> Iterator[r.Record]:
    pytest.fail(f"{record} is written anew")


def read(fd: int) -> r.LedgerState:
    """Its state, if a pool can have it."""
    state = r.LedgerState()
    with closing(EarlierLedger(fd)) as earlier:
        deque(earlier.read(state), 0)
    try:
        deque(Contents().read(state), 0)
    except ValueError as error:
        raise Damaged(str(error)) from error
    return state


def locations(directory: Directory) -> dict[ChunkKey, Location]:
    """Where the live chunks lie."""
    spaces = directory.contents.live._spaces.values()
    return {key: entry.location for space in spaces for key, entry in space.items()}


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger(EPOCH)
    yield made
    made.close()


# ---- what it holds


class CountedChunks(dict[ChunkKey, Location]):
    """A table that counts how many of its entries were read."""

    read = 0

    def __iter__(self) -> Iterator[ChunkKey]:
        for key in super().__iter__():
            self.read += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)

    def pop(self, *key: Any) -> Any:
        self.read += 1
        return super().pop(*key)


def test_resets_go_through_the_other_namespaces_chunks_once_however_many_there_are() -> None:
    """A restart beside half a million chunks and 300 resets took three minutes otherwise."""
    spaces = [bytes([space]) * 8 for space in range(21)]
    state = r.LedgerState(segments={S0: r.SegmentAdded(S0, "gpu-0", "cuda", 64 * KIB)})
    keys = [ChunkKey(space + bytes([at]) * 18) for space in spaces for at in range(100)]
    state.chunks = CountedChunks(dict.fromkeys(keys, PLACE[0]))
    for space in spaces[1:]:
        state.apply(r.Cleared(space))
        state.apply(r.Live({ChunkKey(space + bytes(18)): PLACE[1]}))
        state.apply(r.Cleared(space))
    assert {key[:8] for key in dict.keys(state.chunks)} == {spaces[0]}
    assert isinstance(state.chunks, CountedChunks)
    assert state.chunks.read <= 2 * 2100


@pytest.mark.parametrize(
    "records",
    [
        [r.Live({A: Location(S0, 0, KIB, 1)})],
        [HISTORY[0], r.Held(1, WRITER, {A: PLACE[0], B: PLACE[0]})],
        [HISTORY[0], r.Live({A: Location(S0, 8 * KIB, KIB, 1)})],
        [HISTORY[0], r.Live({A: Location(S0, 0, 0, 1)})],
        [HISTORY[0], r.Live({ChunkKey(b"short"): PLACE[0]})],
        [HISTORY[0], r.Live({A: Location(S0, 0, KIB, 1 << 63)})],
        [r.Counted((1 << 64) - 1)],
        [r.Counted(0, [0])],
        [r.Counted(0, [1] * 257)],
        [r.EpochTable({A[:8]: (1 << 64) - 1})],
        [r.EpochTable({A: 1})],
        [r.EpochTable({n.to_bytes(8): 1 for n in range(258)})],
        [r.Held((1 << 64) - 1, WRITER, {})],
        [r.Held(0, WRITER, {})],
        [r.Held(1, r.ProcessId(1 << 63, 5), {})],
        [r.Held(1, r.ProcessId(-1, 5), {})],
        [r.Held(1, r.ProcessId(11, 1 << 63), {})],
        [r.SegmentAdded(S0, "gpu-0\n", "cuda", KIB)],
        [r.SegmentAdded(S0, "gpu-0", "cuda", 1 << 63)],
        [r.SegmentAdded(SegmentId("a name"), "gpu-0", "cuda", KIB)],
        [r.Gone([ChunkKey(bytes(26))] * 40_000)],
    ],
    ids=lambda records: str(records[-1])[:60],
)
def test_records_that_cannot_all_be_are_damage(ledger: Ledger, records: list[r.Record]) -> None:
    ledger.write(records, compacts_nothing)
    with pytest.raises(Damaged):
        read(ledger.fd)


def test_compaction_shrinks_without_loss(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of requests that the stateful test finds; here the memory is real."""
    monkeypatch.setattr(ledgers, "COMPACT_BYTES", 64 * KIB)
    monkeypatch.setattr(ledgers, "SLICE_BYTES", 500)
    monkeypatch.setattr(ledgers, "FREED_BYTES", 8 * KIB)
    directory = Directory(ServerConfig(), FakeClock())
    directory.add_segment(SegmentInfo(S0, "gpu-0", "cuda", 5 * KIB))
    directory.clear(b"another!", reset=True)
    directory.records.append(r.Counted(0, [EPOCH - 1]))
    written = directory.reserve(CLIENT, [chunk_key(1000)], KIB).reservation
    most = 0
    for number in range(3000):
        held = directory.reserve(CLIENT, [chunk_key(number)], KIB).reservation
        directory.commit(CLIENT, held, [])
        ledger.write(directory.records, directory.still)
        directory.records.clear()
        if number % 50:
            continue
        most = max(most, os.fstat(ledger.fd).st_blocks * 512)
        told = read(ledger.fd)
        assert told.chunks == locations(directory)
        assert (set(told.held), set(told.segments)) == ({written}, {S0})
        assert (told.epochs, told.servers) == (directory.epochs.all(), [EPOCH - 1])
    assert most < 200 * KIB, "3,000 stores write half a megabyte"


# ---- the server is killed

TURNS = 3000


def life(seed: int) -> Iterator[Directory]:
    """A directory after each turn of a life: stores that evict, removals, writers that never
    answer, segments that come and go. The same for the same seed.
    """
    dice = random.Random(seed)
    directory = Directory(ServerConfig(), FakeClock())
    directory.add_segment(SegmentInfo(S0, "gpu-0", "cuda", 12 * KIB))
    for _ in range(TURNS):
        keys = [chunk_key(dice.randrange(40)) for _ in range(dice.randrange(1, 6))]
        what = dice.random()
        if what < 0.8:
            held = directory.reserve(CLIENT, keys, dice.choice([KIB, 700, 2 * KIB])).reservation
            if held and dice.random() < 0.9:
                directory.commit(CLIENT, held, [])
            elif held and dice.random() < 0.9:
                directory.abort(CLIENT, held)
        elif what < 0.95:
            directory.remove(keys)
        elif what < 0.97:
            directory.process_gone(WRITER)
        elif S1 in directory.segments:
            directory.drop_segment(S1)
            directory.tick()
        else:
            directory.add_segment(SegmentInfo(S1, "gpu-1", "cuda", 6 * KIB))
        yield directory


def kept(ledger: Ledger) -> Iterator[Directory]:
    """The directory of a life after each turn, written to the ledger."""
    for directory in life(1):
        ledger.write(directory.records, directory.still)
        directory.records.clear()
        yield directory


def serve(ledger: Ledger, acknowledged: int) -> None:
    """Live in a process of its own, and acknowledge each turn."""
    for turn, _ in enumerate(kept(ledger), 1):
        os.write(acknowledged, turn.to_bytes(8, "little"))
    signal.pause()


def test_a_server_killed_at_any_moment_leaves_what_it_has_acknowledged_or_is_about_to(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never less, and never a half of a turn: a chunk whose slot was given to another one."""
    monkeypatch.setattr(ledgers, "COMPACT_BYTES", 20_000)
    monkeypatch.setattr(ledgers, "SLICE_BYTES", 500)
    monkeypatch.setattr(ledgers, "FREED_BYTES", 8 * KIB)
    truth = [(dict[ChunkKey, Location](), set[int](), set[SegmentId]())]
    for directory in kept(ledger):
        held = {*directory.reservations._void, *directory.reservations._open}
        truth.append((locations(directory), held, set(directory.segments)))
    dice, turns = random.Random(2), set[int]()
    for _ in range(20):
        made = Ledger(EPOCH)
        there, acknowledged = os.pipe()
        server = os.fork()
        if not server:
            try:
                serve(made, acknowledged)
            finally:
                os._exit(1)
        os.close(acknowledged)
        client = os.dup(made.fd)
        made.close()
        assert os.read(there, 8)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        said = b""
        while more := os.read(there, 1 << 16):
            said = more
        turn = max(1, int.from_bytes(said[-8:], "little"))
        os.close(there)
        with closing(EarlierLedger(client)) as earlier:
            assert earlier.take_over(HEIR), "its server has ended"
            deque(earlier.read(state := r.LedgerState()), 0)
        left = state.chunks, set(state.held), set(state.segments)
        assert left in truth[turn : turn + 2], f"after turn {turn}"
        turns.add(turn)
        os.close(client)
    assert len(turns) > 10


# ---- whom to believe


def test_a_ledger_is_taken_over_once_and_not_while_its_server_lives(ledger: Ledger) -> None:
    client = os.dup(ledger.fd)
    with closing(EarlierLedger(client)) as earlier:
        assert not earlier.take_over(HEIR)
        assert (earlier.epoch, earlier.heir) == (EPOCH, 0)
        ledger.close()
        assert earlier.take_over(HEIR)
    with closing(EarlierLedger(client)) as again:
        assert (again.take_over(HEIR + 1), again.heir) == (False, HEIR)
    os.close(client)


def test_clients_can_neither_write_nor_cut_a_ledger(ledger: Ledger) -> None:
    ledger.write(HISTORY, compacts_nothing)
    for harm in (
        lambda: os.pwrite(ledger.fd, b"x", 0),
        lambda: os.ftruncate(ledger.fd, 0),
        lambda: mmap.mmap(ledger.fd, 0),
        lambda: os.ftruncate(ledger._file, 0),  # not even its own user, by mistake
    ):
        with pytest.raises(OSError, match="Bad file|not permitted|denied|Invalid"):
            harm()
    assert read(ledger.fd) == state_of(HISTORY)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_another_user_can_neither_open_a_ledger_for_writing_nor_make_one(ledger: Ledger) -> None:
    child = os.fork()
    if not child:
        os.setuid(NOBODY)
        try:
            os.open(f"/proc/self/fd/{ledger.fd}", os.O_RDWR)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    os.fchown(ledger._file, NOBODY, NOBODY)
    with pytest.raises(OSError, match="not a ledger of uid"):
        EarlierLedger(ledger.fd)


def forged(mode: int = 0o600, seals: int = ledgers._SEALS, data: bytes = b"") -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(valid: int, body: bytes) -> bytes:
    words = ledgers._WORDS.pack(ledgers.MAGIC, EPOCH, valid, 0)
    return words.ljust(mmap.PAGESIZE, b"\0") + body


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: forged(0o777, data=header(0, b"")),  # as segments are, which clients write
        lambda folder: forged(seals=0, data=header(0, b"")),
        lambda folder: forged(data=bytes(2 * mmap.PAGESIZE)),
        lambda folder: forged(data=ledgers._WORDS.pack(ledgers.MAGIC, (1 << 64) - 1, 0, 0)),
        lambda folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600),
        lambda folder: os.pidfd_open(os.getpid()),
    ],
    ids=["writable by others", "can shrink", "no magic", "no epoch", "a file", "a pidfd"],
)
def test_other_memory_is_no_ledger(make: object, tmp_path: Path) -> None:
    fd = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(OSError, match="not a ledger|can shrink|Invalid"):
        EarlierLedger(fd)
    os.close(fd)


def test_no_contents_do_more_than_be_refused(ledger: Ledger) -> None:
    """Whatever the words and frames are: the reader raises Damaged, or has a state that can be."""
    ledger.write([*HISTORY, r.Held(9, WRITER, {})], compacts_nothing)
    assert 9 in read(ledger.fd).held, "though no server reserves nothing"
    valid = ledger._words[ledgers._VALID]
    whole = os.pread(ledger.fd, valid >> 1, ledgers.AREAS[0])
    dice, refused = random.Random(3), 0
    for _ in range(200):
        body = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        word = dice.choice([valid, valid, valid + 2, valid - 2, valid | 1, dice.getrandbits(64)])
        fd = forged(data=header(word, bytes(body)))
        try:
            read(fd)
        except Damaged:
            refused += 1
        os.close(fd)
    assert refused > 100


def test_memory_that_cannot_be_written_ends_the_ledger(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.write(HISTORY, compacts_nothing)

    def full(*_: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(os, "pwrite", full)
    ledger.write(HISTORY[:1], compacts_nothing)
    monkeypatch.undo()
    assert "no space left; going on without one, a restart will be cold" in caplog.text
    ledger.write(HISTORY[:1], compacts_nothing)
    client = os.dup(ledger.fd)
    ledger.close()
    with closing(EarlierLedger(client)) as earlier:
        assert not earlier.take_over(HEIR)
    os.close(client)
