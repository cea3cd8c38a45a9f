"""Damages journals in many ways: does a restarted server ever believe one that is not its
predecessor's last state?

A real directory and a real journal make histories: stores, evictions, removals, dropped segments,
writers that never answer, compactions. Then the file is changed, and a server's parts (journal,
directory, service) start from it; the segments' holders bring the witness and offer their memory
again. It is wrong if a key is found in another place than it was, or if a slot is given away that
holds a chunk which the server no longer knows, or that somebody may still be writing to. A cold
start is right."""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import journal as journals
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.allocator import padded
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.journal import Journal, Witness
from vcache_backend.metadata_server.placement import Peer
from vcache_backend.metadata_server.records import JournalState, ProcessId
from vcache_backend.metadata_server.service import Service
from vcache_backend.metadata_server.succession import Predecessor
from vcache_backend.vram_pool import host_segment

from .results import Row, none, row

MUTATIONS = 100_000
EACH = 500
"""Mutations of one history."""
STEPS = 60
SEGMENTS = {
    m.SegmentId(name): size for name, size in (("s0", 16 << 10), ("s1", 8 << 10), ("s2", 12 << 10))
}
SIZES = (1024, 1024, 1024, 700, 2048)
WRITERS = [Peer(number, ProcessId(100 + number, number), "host", "host") for number in (1, 2, 3)]
OTHER = Peer(9, ProcessId(900, 9), "host", "host")


class History:
    """One life of a server: its journal's bytes when it was killed, those of some earlier moments,
    and what was true at the end.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.epoch = 1 + self.random.getrandbits(62)
        self.witness = Witness(self.epoch)
        self.now = 1000.0
        self.directory = Directory(
            ServerConfig(), lambda: self.now, 1 + self.random.getrandbits(62)
        )
        self.path = folder / "made.journal"
        self._journal = Journal(self.path, self.epoch, WRITERS[0].process)
        self._journal.start(JournalState().records())
        self._open: list[tuple[Peer, int]] = []
        self.older: list[bytes] = []
        for name in SEGMENTS:
            self.directory.add_segment(m.SegmentInfo(name, "host", "host", SEGMENTS[name]))
        for step in range(STEPS):
            self.older += [self.path.read_bytes()] if step % 12 == 0 else []
            self._step()
            self._journal.append(self.directory.records)
            self.directory.records.clear()
            self._journal.compact(self.directory.still)
        self.frame = self._journal.frame
        self._journal.close()
        self.data = self.path.read_bytes()
        self.frames = list(frames(self.data))
        self.live = {entry.key: entry.location for entry in self.directory.contents.live}
        self.written = [
            entry.location
            for _, held in self.directory.reservations.items()
            for entry in held.entries
        ]

    def _keys(self, most: int) -> list[m.ChunkKey]:
        return [_key(self.random.randrange(60)) for _ in range(self.random.randint(1, most))]

    def _step(self) -> None:
        directory, pick = self.directory, self.random
        client, what = pick.choice(WRITERS), pick.random()
        self.now += pick.choice((0.1, 1.0, 5.0))
        if what < 0.5:
            reservation = directory.reserve(
                client, list(dict.fromkeys(self._keys(5))), pick.choice(SIZES)
            ).reservation
            if reservation and pick.random() < 0.8:
                directory.commit(client, reservation, [])
            elif reservation:
                self._open.append((client, reservation))
        elif what < 0.6 and self._open:
            writer, reservation = self._open.pop(pick.randrange(len(self._open)))
            _ = (
                directory.commit(writer, reservation, [])
                if pick.random() < 0.5
                else directory.abort(writer, reservation)
            )
        elif what < 0.75:
            directory.remove(self._keys(4))
        elif what < 0.85:
            directory.touch(self._keys(4))
        elif what < 0.9:
            directory.disconnect(client)
        elif what < 0.92:
            directory.process_gone(client.process)
        elif what < 0.93:
            name = pick.choice(list(directory.segments) or [m.SegmentId("s0")])
            if name in directory.segments:
                directory.drop_segment(name)
        elif what < 0.94:
            directory.clear(pick.choice((b"", _key(0)[: m.NAMESPACE_BYTES])))
        else:
            directory.tick()
        directory.go_on(pick.choice((0, 3, 1000)))


def _key(number: int) -> m.ChunkKey:
    return m.ChunkKey(number.to_bytes(m.KEY_BYTES, "big"))


def frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each frame of a journal starts and ends; the header is the first."""
    at, end = 0, journals.HEADER_BYTES
    while end <= len(data):
        yield at, end
        at, end = end, end + journals.FRAME_BYTES + int.from_bytes(data[end : end + 4], "little")


# ---- mutations


class Written(Protocol):
    """A journal, its frames' places, and its earlier contents."""

    random: random.Random
    data: bytes
    frames: list[tuple[int, int]]
    older: list[bytes]


Mutation = Callable[[Written, Written], bytes]


def _bytes(change: Callable[[random.Random, bytearray], None]) -> Mutation:
    def mutate(here: Written, other: Written) -> bytes:
        data = bytearray(here.data)
        change(here.random, data)
        return bytes(data)

    return mutate


def _records(change: Callable[[random.Random, list[bytes]], None]) -> Mutation:
    def mutate(here: Written, other: Written) -> bytes:
        records = [here.data[start:end] for start, end in here.frames]
        change(here.random, records)
        return b"".join(records)

    return mutate


def _flip(dice: random.Random, data: bytearray) -> None:
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set(dice: random.Random, data: bytearray) -> None:
    data[dice.randrange(len(data))] = dice.choice((0, 1, 0x7F, 0xC1, 0xFF))


def _cut(dice: random.Random, data: bytearray) -> None:
    del data[dice.randrange(len(data)) :]


def _go_on(dice: random.Random, data: bytearray) -> None:
    _cut(dice, data)
    data += dice.randbytes(dice.randrange(200))


def _zero(dice: random.Random, data: bytearray) -> None:
    """A page, or a part of one, that never reached the disk."""
    start, size = dice.randrange(len(data)), dice.choice((64, 512, 4096))
    data[start : start + size] = bytes(len(data[start : start + size]))


def _zeros_put_in(here: Written, other: Written) -> bytes:
    at = here.random.choice(
        [here.random.randrange(len(here.data)), here.random.choice(here.frames)[0]]
    )
    return here.data[:at] + bytes(here.random.choice((16, 512, 4096))) + here.data[at:]


def _copy_within(dice: random.Random, data: bytearray) -> None:
    start, to, size = dice.randrange(len(data)), dice.randrange(len(data)), dice.randrange(1, 400)
    data[to : to + size] = data[start : start + size]


def _swap(dice: random.Random, records: list[bytes]) -> None:
    one, two = dice.randrange(len(records)), dice.randrange(len(records))
    records[one], records[two] = records[two], records[one]


def _another_header(here: Written, other: Written) -> bytes:
    size = journals.HEADER_BYTES
    return here.random.choice(
        (here.data[:size] + other.data[size:], other.data[:size] + here.data[size:])
    )


def _two_files(here: Written, other: Written) -> bytes:
    return here.random.choice((here.data, *here.older)) + here.random.choice(
        (here.data, other.data, *here.older)
    )


KINDS: dict[str, Mutation] = {
    "bits flipped": _bytes(_flip),
    "a byte set": _bytes(_set),
    "cut": _bytes(_cut),
    "cut between records": lambda here, other: here.data[: here.random.choice(here.frames)[0]],
    "cut, then garbage": _bytes(_go_on),
    "a record twice": _records(
        lambda dice, all_: all_.insert(dice.randrange(1, len(all_) + 1), dice.choice(all_))
    ),
    "records swapped": _records(_swap),
    "a record missing": _records(lambda dice, all_: all_.remove(dice.choice(all_))),
    "zeroed": _bytes(_zero),
    "zeros put in": _zeros_put_in,
    "bytes copied over others": _bytes(_copy_within),
    "two files in one": _two_files,
    "an older copy": lambda here, other: here.random.choice(here.older),
    "of another life": lambda here, other: here.random.choice((other.data, *other.older)),
    "another's header": _another_header,
    "untouched": lambda here, other: here.data,
}


# ---- what a restarted server makes of it


def restarted(here: History, path: Path, fds: dict[m.SegmentId, int], believe: bool) -> Service:
    """A server's parts, started from the file, after every segment was offered. believe: take all
    that can be read for true (a control).
    """
    here.witness.reached(here.frame)
    try:
        state = journals.read(path)
    except journals.Damaged:
        state = JournalState()
    clock = here.now + 1000.0
    directory = Directory(ServerConfig(), lambda: clock, 1)
    directory.restore(state)
    clock += 1.0
    predecessor = Predecessor(directory, state, 1)
    service = Service(directory, 1, predecessor)
    if believe:
        predecessor.proven = True
    else:
        predecessor.hear(here.witness.fd)
    for name, fd in fds.items():
        mine = [os.dup(fd)]
        service.answer(OTHER, m.AddSegment(name, "host", "host", SEGMENTS[name], again=True), mine)
        for left in mine:
            os.close(left)
    return service


def wrongs(here: History, directory: Directory) -> int:
    """How many keys are not where they were, and how many slots were given away that were in
    use.
    """
    known = {entry.location for entry in directory.contents.live}
    wrong = sum(here.live.get(entry.key) != entry.location for entry in directory.contents.live)
    taken = [*here.written, *(location for location in here.live.values() if location not in known)]
    for number in range(1000, 1100):
        (slot,) = directory.reserve(OTHER, [_key(number)], 1024).slots
        if not isinstance(slot, m.Location):
            break
        wrong += any(_overlap(slot, other) for other in taken)
    return wrong


def _overlap(one: m.Location, two: m.Location) -> bool:
    starts = one.offset < two.offset + padded(two.length) and two.offset < one.offset + padded(
        one.length
    )
    return one.segment == two.segment and starts


@contextmanager
def _memory() -> Iterator[dict[m.SegmentId, int]]:
    with ExitStack() as undo:
        fds = {}
        for name, nbytes in SEGMENTS.items():
            fds[name] = host_segment.allocate(name, nbytes)
            undo.callback(os.close, fds[name])
        yield fds


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Counts:
    """`warm`: how many of them brought chunks back, by kind."""

    def __init__(self) -> None:
        self.mutations = self.wrong = 0
        self.warm: Counter[str] = Counter()


def campaign(mutations: int, seed: int = 1, believe: bool = False) -> Counts:
    """Try so many mutations; the same ones for the same seed. believe: see `restarted`."""
    counts, kinds = Counts(), list(KINDS.items())
    with (
        tempfile.TemporaryDirectory() as name,
        _memory() as fds,
        patch.object(journals, "COMPACT_BYTES", 3000),
        _quiet(),
    ):
        folder, round_ = Path(name), 0
        while counts.mutations < mutations:
            here, other = (History(folder, seed * 1_000_003 + 2 * round_ + half) for half in (0, 1))
            round_ += 1
            for _ in range(min(EACH, mutations - counts.mutations)):
                kind, mutate = kinds[counts.mutations % len(kinds)]
                path = folder / "mutated.journal"
                path.write_bytes(mutate(here, other))
                service = restarted(here, path, fds, believe)
                counts.mutations += 1
                counts.warm[kind] += bool(len(service.directory))
                counts.wrong += wrongs(here, service.directory)
                service.close()
            for history in (here, other):
                history.witness.close()
    return counts


def run() -> list[Row]:
    """A quarter of an hour."""
    return rows(campaign(MUTATIONS), campaign(MUTATIONS // 50, believe=True))


def rows(counts: Counts, control: Counts) -> list[Row]:
    warm = ", ".join(f"{kind} {number:,}" for kind, number in counts.warm.items() if number)
    what = f"no witness asked, {control.mutations:,} mutations; reference 1"
    return [
        row(
            "journal_mutations",
            "mutations",
            counts.mutations,
            MUTATIONS,
            what=f"of journals; warm starts: {warm}",
            at_least=1,
        ),
        none(
            "journal_wrong",
            "places",
            counts.wrong,
            "keys misplaced, slots given away",
            counts.mutations,
        ),
        row("journal_control_wrong", "places", control.wrong, 1, what=what, at_least=1),
    ]
