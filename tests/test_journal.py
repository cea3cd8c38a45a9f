"""The journal's file: what survives a torn end and a compaction under way, and what is seen of any
damage.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model import FakeClock, chunk_key

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server import records as r
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.journal import Damaged, Journal
from vcache_backend.metadata_server.messages import ChunkKey, Location, SegmentId, SegmentInfo
from vcache_backend.metadata_server.placement import Peer

KIB = 1 << 10
S0 = SegmentId("s0")
WRITER = r.ProcessId(11, 5)
EPOCH = 77
A, B, C = (chunk_key(n) for n in range(3))
PLACE = [Location(S0, at * KIB, KIB, 100 + at) for at in range(8)]
HISTORY: list[r.Record] = [
    r.SegmentAdded(S0, "gpu-0", "cuda", 8 * KIB),
    r.Held(1, WRITER, [A, B], PLACE[:2]),
    r.Published(1),
    r.Held(2, WRITER, [C], [PLACE[2]]),
]


def write(path: Path, records: list[r.Record]) -> None:
    file = Journal(path, EPOCH, WRITER)
    file.start(iter(records))
    file.close()


def state_of(records: list[r.Record]) -> r.JournalState:
    state = r.JournalState(EPOCH, len(records))
    for record in records:
        state.apply(record)
    return state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vcache.journal"


def test_what_was_written_is_read_back(path: Path) -> None:
    assert journal.read(path) == r.JournalState()
    write(path, HISTORY)
    state = journal.read(path)
    assert state.chunks == {B: PLACE[1], A: PLACE[0]}
    assert state.held == {2: HISTORY[3]}
    assert state.segments == {S0: HISTORY[0]}


def test_a_cut_file_is_read_to_its_last_whole_record(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the last write of a killed server. That it is not is the witness's to say: the
    number of its last frame tells.
    """
    ends = set()
    for count in range(len(HISTORY) + 1):
        write(path, HISTORY[:count])
        ends.add(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(journal.HEADER_BYTES, len(whole) + 1):
        path.write_bytes(whole[:cut])
        caplog.clear()
        state = journal.read(path)
        assert ("are no whole record and are left out" in caplog.text) is (cut not in ends)
        assert (state.epoch, state) == (EPOCH, state_of(HISTORY[: state.frame]))
        assert (state.frame == len(HISTORY)) is (cut == len(whole))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("bit", [0, 7])
def test_a_file_with_a_flipped_bit_is_damaged_or_ends_earlier(path: Path, bit: int) -> None:
    write(path, HISTORY)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        try:
            assert journal.read(path).frame < len(HISTORY)
        except Damaged:
            continue


@pytest.mark.parametrize(
    "records",
    [
        [r.Live([A], [Location(S0, 0, KIB, 1)])],
        [HISTORY[0], r.Held(1, WRITER, [A, B], [PLACE[0], PLACE[0]])],
        [HISTORY[0], r.Live([A], [Location(S0, 8 * KIB, KIB, 1)])],
        [HISTORY[0], r.Live([A], [Location(S0, 0, 0, 1)])],
        [HISTORY[0], r.Live([ChunkKey(b"short")], [PLACE[0]])],
        [HISTORY[0], r.Live([A, B], [PLACE[0]])],
    ],
    ids=["no segment", "one slot twice", "outside", "no bytes", "no key", "uneven"],
)
def test_records_that_cannot_all_be_true_are_damage(path: Path, records: list[r.Record]) -> None:
    write(path, records)
    with pytest.raises(Damaged):
        journal.read(path)


def test_a_journal_s_writer_is_known_from_its_header(path: Path) -> None:
    assert journal.writer(path) is None
    write(path, HISTORY)
    assert journal.writer(path) == WRITER
    path.write_bytes(b"X" + path.read_bytes()[1:])
    assert journal.writer(path) is None


def test_links_and_files_of_others_are_neither_read_nor_written(path: Path) -> None:
    precious = path.with_name("precious")
    precious.write_bytes(b"precious")
    path.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        journal.read(path)
    path.with_name(path.name + ".new").symlink_to(precious)
    write(path, HISTORY)
    assert precious.read_bytes() == b"precious"
    assert not path.is_symlink()
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(OSError, match="belongs to uid 65534"):
            journal.read(path)


@pytest.mark.parametrize("garbage", [b"", b"x" * 43, b"vcache-j" + bytes(200)], ids=len)
def test_a_file_of_garbage_is_damaged(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    with pytest.raises(Damaged, match="no header"):
        journal.read(path)


def test_the_old_file_stays_until_the_new_one_is_whole(path: Path) -> None:
    write(path, HISTORY)
    started = Journal(path, EPOCH, WRITER)
    assert journal.read(path) == state_of(HISTORY)
    started.start(iter(HISTORY[:1]))
    assert journal.read(path) == state_of(HISTORY[:1])
    started.close()


def test_a_small_journal_is_never_compacted(path: Path) -> None:
    file = Journal(path, EPOCH, WRITER)
    file.start(iter([]))
    file.append(HISTORY)
    file.compact(lambda record: pytest.fail("it is written anew"))
    file.close()


def test_an_abandoned_journal_leaves_nothing_to_be_misled_by(path: Path) -> None:
    file = Journal(path, EPOCH, WRITER)
    file.start(iter(HISTORY))
    file.abandon()
    assert list(path.parent.iterdir()) == []


def test_records_of_unknown_reservations_and_chunks_change_nothing() -> None:
    records: list[r.Record] = [r.Published(5), r.Returned(6), r.Gone([A]), r.SegmentGone(S0)]
    assert state_of(records) == r.JournalState(EPOCH, len(records))


def test_a_clear_takes_its_namespace_out_and_goes_through_no_other_one() -> None:
    def of(letter: bytes, number: int) -> ChunkKey:
        return ChunkKey(letter * 8 + number.to_bytes(18, "big"))

    state = state_of(
        [
            HISTORY[0],
            r.Live([of(b"a", 1), of(b"b", 2), of(b"a", 3)], PLACE[:3]),
            r.Cleared(b"a" * 8),
        ]
    )
    chunks = state.chunks
    records: list[r.Record] = [
        r.Gone([of(b"b", 2)]),
        r.Held(1, WRITER, [of(b"c", 4), of(b"b", 2), of(b"a", 3)], PLACE[3:6]),
        r.Published(1),
        r.Cleared(b"a" * 8),
    ]
    for record in records:
        state.apply(record)
    assert state.chunks is chunks, "made anew for each clear, a long journal takes minutes to read"
    assert list(chunks) == [of(b"b", 2), of(b"c", 4)]
    for record in (r.Cleared(b""), r.Live([of(b"a", 1)], PLACE[:1]), r.Cleared(b"b" * 8)):
        state.apply(record)
    assert list(state.chunks) == [of(b"a", 1)]


CLIENT = Peer(1, WRITER, "gpu-0", "cuda")


def test_compaction_shrinks_a_file_of_things_long_gone_and_loses_nothing_that_happens_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of requests that the stateful test finds; here the files are real."""
    monkeypatch.setattr(journal, "COMPACT_BYTES", 5_000)
    monkeypatch.setattr(journal, "SLICE_BYTES", 500)
    directory = Directory(ServerConfig(), FakeClock())
    directory.add_segment(SegmentInfo(S0, "gpu-0", "cuda", 5 * KIB))
    directory.clear(b"another!", reset=True)
    written = directory.reserve(CLIENT, [chunk_key(1000)], KIB).reservation
    file = Journal(path, EPOCH, WRITER)
    file.start(r.JournalState().records())
    largest, files = 0, set()
    for number in range(600):
        directory.commit(
            CLIENT, directory.reserve(CLIENT, [chunk_key(number)], KIB).reservation, []
        )
        file.append(directory.records)
        directory.records.clear()
        file.compact(directory.still)
        largest = max(largest, path.stat().st_size)
        files.add(path.stat().st_ino)
        told = journal.read(path)
        assert told.chunks == {entry.key: entry.location for entry in directory.contents.live}
        assert (set(told.held), set(told.segments), told.epochs) == (
            {written},
            {S0},
            directory.epochs.all(),
        )
    file.close()
    assert (largest < 20_000, len(files) > 1, path.stat().st_mode & 0o777) == (True, True, 0o600)
