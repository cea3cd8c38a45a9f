"""The blocks that one instance has published in its KV cache, in a log of fixed size. No socket, no
fd.

A block's number and its generation name one content for good: the instance changes the generation
before the block gets another content. So a published block is right as long as the instance's
generation table has the published generation, and nothing has to be taken back. The table is memory
of the instance's process, sealed against shrinking, so that reading it never fails."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Sequence
from operator import eq, itemgetter
from typing import Any, Literal, NamedTuple

from vcache_backend.errors import Refused
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable

BLOCK_BYTES = 256
"""About how much of the server's memory an instance takes for each of its blocks."""
ONE_FULL = [m.BlockTable("full")]
Chunk = tuple[int, int, int]
"""Of a chunk: the last block, its generation, and the first block."""


class Piece(NamedTuple):
    """The blocks [first, stop) of an answer, which one instance has: packed numbers and
    generations."""

    there: InstancePublications
    table: int
    first: int
    stop: int
    blocks: list[bytearray]
    generations: list[bytearray]

    def packed(self, stop: int) -> m.ResidentRun:
        """The run before block `stop`, where the hit ends; maybe empty."""
        packs = b"".join(self.blocks), b"".join(self.generations)
        run = m.ResidentRun(self.first, *packs, self.table, self.there.join.instance)
        return run.cut(self.first, max(self.first, min(stop, self.stop)))


class LogPiece(NamedTuple):
    """Consecutive blocks of one table. agreed: a bit of each rank that has published the block."""

    table: int
    hashes: bytes
    numbers: Sequence[int]
    generations: Sequence[int]
    agreed: Sequence[int]


def suffix(table: int) -> bytes:
    """What follows a hash in the name of a block of this table."""
    return bytes([table]) if table else b""


class InstancePublications:
    """All publications of one instance.

    The log has twice as many places as the instance has blocks. New blocks overwrite the oldest
    places; what is still right there is moved to the end. Place 0 is empty."""

    MAX_MOVED = 1024
    """How many blocks a publication moves at most, to make room in the log. It drops the others,
    each a miss."""
    MAX_ALIKE = 16
    """The most blocks of one name that are told apart."""

    def __init__(self, join: m.Join, table: ForeignTable) -> None:
        self.join, self.table, self._counters = join, table, table.words
        self.namespace, self.blocks, self.ranks = join.namespace, join.blocks, join.ranks
        self.each, self.tables = join.each, join.tables
        full = [number for number, table in enumerate(self.tables) if table.kind == "full"]
        self.leading = full[0] if full else 0
        """The table whose blocks say which chunks have arrived."""
        self._suffixes = list(map(suffix, range(len(self.tables))))
        self.named: dict[bytes, int] = {}
        """The place of a block by name, its hash and `suffix`: of several, the newest."""
        self._next, self._size = 1, 2 * self.blocks + m.MAX_PUBLISHED
        size = self._size
        self._hashes, self._tables = bytearray(m.HASH_BYTES * size), bytearray(size)
        self._packed, self._counted = bytearray(4 * size), bytearray(8 * size)
        """The blocks' numbers and generations, packed; the next two are the same memory."""
        self._numbers: memoryview[int] = memoryview(self._packed).cast("I")
        self._generations: memoryview[int] = memoryview(self._counted).cast("Q")
        self._stops = _numbers("I", size)
        """For each place, where its run stops. Newer runs overwrite the beginning of it first."""
        self._earlier = _numbers("I", size)
        """For each place, an earlier one of the same name, if it still has the name; or 0."""
        self._agreed, self._all = _numbers("Q", size), (1 << self.ranks) - 1
        self._place_of = _numbers("I", self.blocks)
        """The newest place of each block; 0: none, or the block has changed since."""
        self._found = _numbers("Q", self.blocks)
        """The generation of each block that all ranks have published; 0: none."""

    @property
    def live(self) -> int:
        """How many blocks look-ups return. Takes some 40 us a thousand blocks."""
        return sum(map(eq, self._counters, self._found))

    # ---- published

    def publish(self, rank: int, runs: Sequence[m.BlockRun]) -> list[bytes]:
        """Take runs that a rank publishes. Returns the last hash of each chunk that is complete
        with them, or gone again. Refuses impossible runs, and then takes none."""
        if rank >= self.ranks:
            raise Refused(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        if sum(run.count for run in runs) > m.MAX_PUBLISHED:
            raise Refused(f"publish: more than {m.MAX_PUBLISHED:,} blocks")
        made = [self._unpacked(run) for run in runs]
        taken = [self._take(rank, run, *blocks) for run, blocks in zip(runs, made, strict=True)]
        return [end for ends in taken for end in ends]

    def clear(self) -> int:
        """Forget all blocks. Returns how many."""
        dropped, self.named = self.live, {}
        self._place_of, self._found = _numbers("I", self.blocks), _numbers("Q", self.blocks)
        return dropped

    # ---- looked up

    def at(self, name: bytes) -> int:
        """The place of an unchanged block that all ranks have published; 0: none. Of several the
        oldest, as in vLLM's own cache: a step of another shape may have computed a later one with
        other last bits. Forgets changed blocks."""
        at = self.named.get(name, 0)
        if not at:
            return 0
        if not self._earlier[at]:
            # Written out: a call takes as long as all of this.
            right = self._counters[self._numbers[at]] == self._generations[at]
            if right and self._agreed[at] == self._all:
                return at
        at, found = self._newest(name), 0
        # Of the newest one some ranks may still be to come.
        for _ in range(self.MAX_ALIKE):
            if not at:
                break
            if self._agreed[at] == self._all and self._is_right(at):
                found = at
            at = self._before(at, name)
        return found

    def follow(self, table: int, hashes: bytes, first: int, stop: int) -> Piece:
        """Collect the blocks of a table with the packed `hashes` from number `first` on, up to
        `stop`, as long as they are here and unchanged."""
        end, size, at = self._suffixes[table], m.HASH_BYTES, first
        blocks, generations = list[bytearray](), list[bytearray]()
        while at < stop:
            name = hashes[at * size : (at + 1) * size]
            if not (place := self.at(name + end if end else name)):
                break
            count = self._stops[place] - place
            if count > 1:
                count = _common(self._hashes, place, hashes, at, min(count, stop - at))
                changed = self._right(place, place + count).find(0) if count > 1 else 0
                count = changed if changed > 0 else count
            blocks.append(self._packed[4 * place : 4 * (place + count)])
            generations.append(self._counted[8 * place : 8 * (place + count)])
            at += count
        return Piece(self, table, first, at, blocks, generations)

    def has(self, hash_: bytes) -> bool:
        """Whether the leading table has a block of this hash."""
        return self.at(hash_ + self._suffixes[self.leading]) > 0

    def chunk(self, hash_: bytes) -> Chunk | None:
        """The chunk that ends with this hash; None if it is not in one run."""
        at = self.at(hash_ + self._suffixes[self.leading])
        first = at + 1 - self.each
        if first < 1 or self._stops[first] != self._stops[at] or 0 in self._right(first, at + 1):
            return None
        return self._numbers[at], self._generations[at], self._numbers[first]

    # ---- inside

    def _unpacked(self, run: m.BlockRun) -> tuple[list[int], list[int]]:
        """The numbers and generations of a run, checked."""
        count = run.count
        sizes = len(run.hashes), len(run.blocks), len(run.generations)
        if sizes != (count * m.HASH_BYTES, count * m.NUMBER_BYTES, count * m.GENERATION_BYTES):
            raise Refused(f"publish: {sizes} B of hashes, numbers and generations")
        if run.table >= len(self.tables):
            raise Refused(f"publish: table {run.table} of an instance with {len(self.tables)}")
        numbers = list(struct.unpack(f"<{count}I", run.blocks))
        if numbers and max(numbers) >= self.blocks:
            raise Refused(f"publish: block {max(numbers):,} of an instance with {self.blocks:,}")
        generations = list(struct.unpack(f"<{count}Q", run.generations))
        if any(number & 1 for number in set(generations)):
            raise Refused("publish: an odd generation, of a block that must not be read")
        return numbers, generations

    def _take(
        self, rank: int, run: m.BlockRun, numbers: list[int], generations: list[int]
    ) -> list[bytes]:
        """Note that a rank has published a run. See `publish`."""
        places, table, size = [self._place_of[at] for at in numbers], run.table, m.HASH_BYTES
        before = [
            self._agreed[at] if self._generations[at] == generation else 0
            for at, generation in zip(places, generations, strict=True)
        ]
        right = map(eq, map(self._counters.__getitem__, numbers), generations)
        # Nobody needs to wait for a block that has changed.
        by = zip(before, right, strict=True)
        after = [told | 1 << rank if same else self._all for told, same in by]
        piece = LogPiece(table, run.hashes, numbers, generations, after)
        first, stop = (places[0], places[0] + run.count) if places else (0, 0)
        if first and places == [*range(first, stop)] and self._piece(first, stop)[:4] == piece[:4]:
            self._agreed[first:stop] = array("Q", after)
            for at in range(first, stop):
                self._find(at)
        else:
            self._append(piece)
        scale = self.tables[table].scale
        chunk = self.each // scale if table == self.leading and not self.each % scale else 0
        ends = range(-(run.first + 1) % chunk, run.count, chunk) if chunk else ()
        new = [at for at in ends if before[at] != after[at] == self._all]
        return [run.hashes[at * size : (at + 1) * size] for at in new]

    def _newest(self, name: bytes) -> int:
        """The newest place of a name, after forgetting changed blocks; 0: none."""
        while (at := self.named.get(name, 0)) and not self._is_right(at):
            self._forget(at)
        return at

    def _append(self, piece: LogPiece) -> None:
        """Put blocks at the end of the log, and then those that had to make room."""
        queue, moved = deque([piece]), -len(piece.numbers)
        while queue:
            table, hashes, numbers, generations, agreed = queue.popleft()
            count = len(numbers)
            moved += count
            if not count or moved > self.MAX_MOVED:
                continue
            if self._next + count > self._size:
                queue.extend(self._cleared(self._next, self._size))
                self._next = 1
            first, stop = self._next, self._next + count
            queue.extend(self._cleared(first, stop))
            self._next = stop
            self._hashes[first * m.HASH_BYTES : stop * m.HASH_BYTES] = hashes
            self._tables[first:stop] = bytes([table]) * count
            self._numbers[first:stop] = array("I", numbers)
            self._generations[first:stop] = array("Q", generations)
            self._agreed[first:stop] = array("Q", agreed)
            self._stops[first:stop] = array("I", [stop]) * count
            end, named, places = self._suffixes[table], self.named, self._place_of
            names = struct.iter_unpack(f"{m.HASH_BYTES}s", hashes)
            for at, (block, (name,)) in enumerate(zip(numbers, names, strict=True), first):
                if not self._is_right(at):
                    continue
                if old := places[block]:
                    self._forget(old)
                name += end
                self._earlier[at] = self._newest(name) if name in named else 0
                named[name] = places[block] = at
                self._find(at)

    def _cleared(self, first: int, stop: int) -> list[LogPiece]:
        """Forget what is at these places. Returns the blocks that are unchanged."""
        pieces, begin = list[LogPiece](), 0
        if not self._counted[8 * first : 8 * stop].strip(b"\0"):  # never used
            return pieces
        for at in range(first, stop):
            kept = self._place_of[self._numbers[at]] == at
            here = kept and self._is_right(at)
            if kept:
                self._forget(at)
            if begin and (not here or self._stops[at] != self._stops[begin]):
                pieces.append(self._piece(begin, at))
                begin = 0
            begin = begin or (at if here else 0)
        return [*pieces, self._piece(begin, stop)] if begin else pieces

    def _piece(self, first: int, stop: int) -> LogPiece:
        return LogPiece(
            self._tables[first],
            bytes(self._hashes[first * m.HASH_BYTES : stop * m.HASH_BYTES]),
            self._numbers[first:stop].tolist(),
            self._generations[first:stop].tolist(),
            self._agreed[first:stop].tolist(),
        )

    def _forget(self, at: int) -> None:
        """Forget the block at this place."""
        block, name = self._numbers[at], self._name(at)
        if self._place_of[block] == at:
            self._place_of[block] = self._found[block] = 0
        if self.named.get(name) == at:
            if before := self._before(at, name):
                self.named[name] = before
            else:
                del self.named[name]

    def _find(self, at: int) -> None:
        """Count the block at this place as found, if all ranks have published it."""
        if self._agreed[at] == self._all:
            self._found[self._numbers[at]] = self._generations[at]

    def _before(self, at: int, name: bytes) -> int:
        """The place that had the name before this one, and still has it; 0: none."""
        for _ in range(self.MAX_ALIKE):
            at = self._earlier[at]
            if not at or self._name(at) != name:
                break
            if self._place_of[self._numbers[at]] == at:
                return at
        return 0

    def _name(self, at: int) -> bytes:
        hash_ = bytes(self._hashes[at * m.HASH_BYTES : (at + 1) * m.HASH_BYTES])
        return hash_ + self._suffixes[self._tables[at]]

    def _is_right(self, at: int) -> bool:
        return self._counters[self._numbers[at]] == self._generations[at]

    def _right(self, first: int, stop: int) -> bytes:
        """A byte for each of several places: 1 if the block is unchanged, and all ranks have
        published it."""
        if stop - first == 1:
            return bytes([self._is_right(first) and self._agreed[first] == self._all])
        now = itemgetter(*self._numbers[first:stop])(self._counters)
        right = struct.pack(f"<{stop - first}Q", *now) == self._counted[8 * first : 8 * stop]
        if right and self.ranks == 1:
            return b"\1" * (stop - first)
        both = zip(now, self._generations[first:stop], self._agreed[first:stop], strict=True)
        return bytes([here == then and by == self._all for here, then, by in both])


def _numbers(kind: Literal["I", "Q"], size: int) -> memoryview[int]:
    memory: memoryview[Any] = memoryview(bytearray(struct.calcsize(kind) * size))
    return memory.cast(kind)


def _common(ours: bytearray, at: int, theirs: bytes, first: int, count: int) -> int:
    """Count the equal hashes from numbers `at` and `first` on, of `count`, of which the first are
    equal."""
    size = m.HASH_BYTES
    same, ours = 1, ours[at * size : (at + count) * size]
    theirs = theirs[first * size : (first + count) * size]
    if ours == theirs:
        return count
    while count - same > 1:
        half = (same + count) // 2
        if ours[same * size : half * size] == theirs[same * size : half * size]:
            same = half
        else:
            count = half
    return same
