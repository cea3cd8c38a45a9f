"""The blocks that one instance has published in its KV cache, run by run. No socket, no fd.

A block counts while the instance's generation table says what it said at publication: the instance
may reuse a block at any time. The table is memory of the instance's process, sealed against
shrinking, so that reading it never fails."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import NamedTuple

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.directory import Steps
from vcache_backend.protocol import generation_table
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.slot_layout import DEAD_AT

RETRACT_LOOKS = 4096
"""How many of the newest runs a retraction examines. A retraction drops all older runs unexamined;
a run dropped without need is a miss."""
MAX_BYTES = 1 << 30
"""About the most server memory for all instances together."""
RUN_BYTES, ENTRY_BYTES, BLOCK_BYTES = 640, 176, 128
"""Bytes of server memory for each run, for each block of a run, and for each block of an instance.
The last pays for `holders`, `places`, the dicts of names, which never shrink, and the instance's
generation table."""
MAX_SPARE = 16
"""The most further blocks of a name; newer ones are not taken."""
MOST_KEPT = 2
"""The blocks of all of an instance's runs, forgotten blocks included, in an instance's blocks."""
SHORTEN_LOOKS = 1024
"""How many of the oldest runs one run renews so that this bound holds, some milliseconds. Then the
oldest runs are dropped; a run dropped without need is a miss."""

COMPARED = 16
"""As many blocks of a run are compared in the time of a look into the tables."""

Numbers = tuple[int, ...]
Chunk = tuple[int, int, int]
"""Of a chunk: the last block, its generation, and the first block."""


class Memory:
    """About how many bytes of server memory the publications of all instances take."""

    nbytes = 0

    def has(self, nbytes: int) -> bool:
        """Whether so many bytes more may be taken."""
        return self.nbytes + nbytes <= MAX_BYTES


class Run(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks of one block table, as published. `numbers`, `expected`: the numbers and
    the generations once more. `alive`: a byte for each block, 0 once look-ups must leave it out.
    `left`: how many are alive. `life`: see `InstancePublications.life`. `home`: where the run is
    kept. `agreed`: a bit for each rank that has published the run."""

    table: int
    first: int
    sequence: int
    hashes: bytes
    blocks: bytes
    generations: bytes
    numbers: Numbers
    expected: Numbers
    alive: bytearray
    left: int
    life: int
    home: dict[Run, None]
    agreed: int

    def __len__(self) -> int:
        return len(self.numbers)

    def hash(self, at: int) -> bytes:
        return self.hashes[at * m.HASH_BYTES : (at + 1) * m.HASH_BYTES]

    def packed(self, first: int, stop: int) -> tuple[bytes, bytes]:
        """The numbers and the generations of these blocks, as in the protocol."""
        return (
            self.blocks[first * m.NUMBER_BYTES : stop * m.NUMBER_BYTES],
            self.generations[first * m.GENERATION_BYTES : stop * m.GENERATION_BYTES],
        )


class Followed(NamedTuple):
    """See `InstancePublications.follow`: where the blocks end, their packed numbers and
    generations, and the remaining looks."""

    stop: int
    blocks: list[bytes]
    generations: list[bytes]
    looks: int


class ForeignTable:
    """The generation table of an instance, mapped as long as this object lives."""

    def __init__(self, fd: int, instance: bytes, blocks: int) -> None:
        """Raises SegmentError unless the caller's `fd` is the sealed table of `instance`."""
        memory = memoryview(generation_table.mapped(fd, instance, blocks))
        first = mmap.PAGESIZE
        self.counters = memory[first : first + blocks * m.GENERATION_BYTES].cast("Q")
        self._dead = memory[DEAD_AT : DEAD_AT + 4].cast("I")

    @property
    def dead(self) -> bool:
        return bool(self._dead[0])


def suffix(table: int) -> bytes:
    """What follows a hash in the name of a block of this table."""
    return bytes([table]) if table else b""


class InstancePublications:
    """All publications of one instance. A block is in at most one run, so the number of blocks
    bounds the tables. All runs together have at most `MOST_KEPT` times as many blocks."""

    def __init__(self, join: m.Join, table: ForeignTable, memory: Memory) -> None:
        self.join, self.table, self._memory = join, table, memory
        self.namespace, self.blocks, self.ranks = join.namespace, join.blocks, join.ranks
        self.each, self.tables = join.each, join.tables
        self.whole = False
        """Whether every part of the instance is shown. Look-ups skip the instance until then."""
        self.named: dict[bytes, int] = {}
        """The number of a block by name, its hash and `suffix`."""
        self._spare: dict[bytes, list[int]] = {}
        """Further blocks of a name, which two requests have computed at a time."""
        self.holders: list[Run | None] = [None] * self.blocks
        self.places = array("H", bytes(2 * self.blocks))
        """For each block its run, and its place there."""
        self.live = 0
        """The number of blocks that look-ups may return."""
        self.life = 0
        """Runs of an earlier life are void, and are being forgotten."""
        self.runs: dict[Run, None] = {}
        """The oldest first."""
        self._awaited: dict[tuple[int, int, int], Run] = {}
        """Runs that some ranks have published, but not yet all; by sequence, table and first."""
        self._waiting: dict[Run, None] = {}
        """The same, the oldest first."""
        self._of_runs, self._of_waiting = 0, 0
        """The blocks of all runs, forgotten blocks included, and of the awaited runs."""
        self._kept = 1
        """The runs in memory, void runs included; one more until `close`."""
        memory.nbytes += self.blocks * BLOCK_BYTES
        self._floor = 0
        full = [number for number, table in enumerate(self.tables) if table.kind == "full"]
        self.leading = full[0] if full else 0
        """The table whose blocks say which chunks have arrived."""

    # ---- published

    def publish(self, rank: int, runs: Sequence[m.BlockRun]) -> tuple[int, list[Run]]:
        """Take runs that a rank publishes. Returns how many blocks were taken, and the runs that
        look-ups return from now on. Refuses impossible runs, and then takes none."""
        if rank >= self.ranks:
            raise Refused(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        if sum(run.count for run in runs) > m.MAX_PUBLISHED:
            raise Refused(f"publish: more than {m.MAX_PUBLISHED:,} blocks")
        made = [self._made(rank, run) for run in runs]
        taken, complete = 0, list[Run]()
        for run in made:
            if run.sequence < self._floor or not run.numbers:
                continue
            if self.ranks > 1:
                count, whole = self._agree(run)
            else:
                count, whole = self._take(run), run
            taken += count
            if whole is not None and whole.left:
                complete.append(whole)
        return taken, complete

    def retract(self, sequence: int) -> tuple[int, list[dict[Run, None]]]:
        """Void runs with a lower sequence. Returns how many blocks became void, and the void runs,
        for `forget`."""
        if sequence <= self._floor:
            return 0, []
        self._floor = sequence
        before, self.life = self.live, self.life + 1
        void = [self.runs, self._waiting]
        self.runs, self._waiting, self.live = self._split(self.runs), self._split(self._waiting), 0
        self._awaited = {_key(run): run for run in self._waiting}
        self.live = sum(run.left for run in self.runs)
        self._of_runs = sum(map(len, self.runs))
        self._of_waiting = sum(map(len, self._waiting))
        return before - self.live, void

    def clear(self) -> tuple[int, list[dict[Run, None]]]:
        """Void all runs. Returns how many blocks became void, and the void runs, for `forget`."""
        dropped, void = self.live, [self.runs, self._waiting]
        self.life, self.live, self._of_runs, self._of_waiting = self.life + 1, 0, 0, 0
        self.runs, self._waiting, self._awaited = {}, {}, {}
        return dropped, void

    def close(self) -> list[dict[Run, None]]:
        """Like `clear`. The memory counts until all runs are forgotten."""
        void = self.clear()[1]
        self._let_go()
        return void

    def forget(self, void: list[dict[Run, None]]) -> Steps:
        """Remove void runs from memory. A run with more blocks takes more steps."""
        for runs in void:
            while runs:
                run = next(iter(runs))
                steps = 1 + len(run) // 4
                self._drop(run)
                yield from repeat(None, steps)

    # ---- looked up

    def at(self, name: bytes) -> tuple[Run, int] | None:
        """The run of a block, and the block's place there."""
        while (block := self.named.get(name, -1)) >= 0:
            run = self.holders[block]
            if run is not None and run.life == self.life:
                return run, self.places[block]
            self._vacate(block)  # void, but another block may have the name
        return None

    def follow(self, table: int, hashes: bytes, first: int, stop: int, looks: int) -> Followed:
        """Collect the blocks of a table with the packed `hashes` from number `first` on, up to
        `stop`, as long as they are here and unchanged. Forgets changed blocks. looks: how many runs
        to look for; comparing `COMPARED` blocks counts as one more."""
        named, end, size = self.named, suffix(table), m.HASH_BYTES
        blocks, generations, at = list[bytes](), list[bytes](), first
        while at < stop and looks > 0:
            looks -= 1
            name = hashes[at * size : (at + 1) * size]
            if (block := named.get(name + end if end else name, -1)) < 0:
                break
            if (run := self._holder(block)) is None:
                continue
            if len(run.numbers) == 1:
                blocks.append(run.blocks)
                generations.append(run.generations)
                at += 1
                continue
            place = self.places[block]
            count = min(_alive(run, place) - place, stop - at)
            count = _common(run.hashes, place, hashes, at, count)
            if not self._unchanged(run, place, place + count):
                count = _alive(run, place) - place
            looks -= count // COMPARED
            packed = run.packed(place, place + count)
            blocks.append(packed[0])
            generations.append(packed[1])
            at += count
        return Followed(at, blocks, generations, looks)

    def _holder(self, block: int) -> Run | None:
        """The run of a block. None, and the block is forgotten, if the run is void or is only this
        block, which has changed, as most runs of a generated text are. Another block may have the
        name."""
        run = self.holders[block]
        gone = run is None or run.life != self.life
        if run is not None and len(run.numbers) == 1:
            gone = gone or self.table.counters[block] != run.expected[0]
        if gone:
            self._vacate(block)
        return None if gone else run

    def follow_back(
        self, table: int, hashes: bytes, first: int, stop: int, looks: int
    ) -> tuple[int, int]:
        """Where the blocks begin that are here and unchanged without a gap up to `stop`, and the
        remaining looks. Like `follow`, but goes back to `first`, and relies on hashes of prefixes:
        what comes before equal hashes is equal. `follow` compares it."""
        named, end, size = self.named, suffix(table), m.HASH_BYTES
        at = stop
        while at > first and looks > 0:
            looks -= 1
            name = hashes[(at - 1) * size : at * size]
            if (block := named.get(name + end if end else name, -1)) < 0:
                break
            if (run := self._holder(block)) is None:
                continue
            if len(run.numbers) == 1:
                at -= 1
                continue
            place = self.places[block] + 1
            count = min(place - 1 - run.alive.rfind(0, 0, place), at - first)
            if not self._unchanged(run, place - count, place):
                count = place - 1 - run.alive.rfind(0, 0, place)
            looks -= count // COMPARED
            at -= count
        return at, looks

    def has(self, hash_: bytes) -> bool:
        """Whether the leading table has a block of this hash."""
        return self.at(hash_ + suffix(self.leading)) is not None

    # ---- chunks

    def chunk_ends(self, run: Run) -> Iterator[int]:
        """The places in a run of the leading table at which a chunk ends."""
        scale = self.tables[run.table].scale
        if run.table == self.leading and not self.each % scale:
            period = self.each // scale
            for at in range(-(run.first + 1) % period, len(run), period):
                if run.alive[at]:
                    yield at

    def chunk(self, hash_: bytes) -> Chunk | None:
        """The chunk that ends with this hash; None if it is not in one run."""
        if (found := self.at(hash_)) is None:
            return None
        run, at = found
        first = at + 1 - self.each
        if first < 0 or (run.first + at + 1) % self.each or 0 in run.alive[first : at + 1]:
            return None
        return run.numbers[at], run.expected[at], run.numbers[first]

    # ---- inside

    def _made(self, rank: int, run: m.BlockRun) -> Run:
        """Check and unpack one run."""
        count = run.count
        sizes = len(run.hashes), len(run.blocks), len(run.generations)
        if sizes != (count * m.HASH_BYTES, count * m.NUMBER_BYTES, count * m.GENERATION_BYTES):
            raise Refused(f"publish: {sizes} B of hashes, numbers and generations")
        if run.table >= len(self.tables):
            raise Refused(f"publish: table {run.table} of an instance with {len(self.tables)}")
        numbers: Numbers = struct.unpack(f"<{count}I", run.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refused(f"publish: block {max(numbers):,} of an instance with {self.blocks:,}")
        same, all_ = dict[int, int](), struct.unpack(f"<{count}Q", run.generations)
        expected: Numbers = tuple(map(same.setdefault, all_, all_))
        if any(number & 1 for number in same):
            raise Refused("publish: an odd generation, of a block that must not be read")
        packed = run.hashes, run.blocks, run.generations
        alive, agreed = bytearray(b"\1") * count, 1 << rank
        return Run(
            run.table, run.first, run.sequence, *packed, numbers, expected, alive, 0, 0, {}, agreed
        )

    def _agree(self, new: Run) -> tuple[int, Run | None]:
        """Note that a rank has published a run; take what all ranks have published of it. Returns
        how many blocks count, and the run if it is complete."""
        if self._same(new):
            return len(new), None
        old = self._awaited.get(_key(new))
        if old is not None:
            self._drop(old)
            new = _agreed(old, new)
        if not new.numbers:
            return 0, None
        if new.agreed == (1 << self.ranks) - 1:
            return self._take(new), new
        return self._await(new), None

    def _same(self, new: Run) -> bool:
        """Whether a run has been taken before, as far as `new` goes, and all of that is alive."""
        here = self.at(new.hash(0) + suffix(new.table))
        if here is None or _key(here[0]) != _key(new) or 0 in here[0].alive[: len(new)]:
            return False
        return len(_agreed(here[0], new)) == len(new)

    def _await(self, run: Run) -> int:
        if not self._room(run):
            return 0
        self._keep(run, self._waiting)
        self._awaited[_key(run)] = run
        self._of_waiting += len(run)
        while self._of_waiting > self.blocks:
            self._drop(next(iter(self._waiting)))
        return len(run)

    def _take(self, run: Run) -> int:
        """Take a run's blocks, but for those that a newer run holds. Returns how many. Takes none
        if a block or a hash comes twice."""
        end, count = suffix(run.table), len(run)
        if self._same(run):
            return count
        names = [name + end for (name,) in struct.iter_unpack(f"{m.HASH_BYTES}s", run.hashes)]
        if len(set(run.numbers)) < count or len(set(names)) < count or not self._room(run):
            return 0
        named, holders, places, sequence = self.named, self.holders, self.places, run.sequence
        for at, (name, block) in enumerate(zip(names, run.numbers, strict=True)):
            if holders[block] is not None:
                if self._is_newer(block, sequence):
                    run.alive[at] = 0
                    continue
                self._vacate(block)
            if name in named and self._has_other(name):
                # As vLLM's own cache, which finds the first of several blocks with one hash.
                spare = self._spare.setdefault(name, [])
                if len(spare) == MAX_SPARE:
                    run.alive[at] = 0
                    continue
                spare.append(block)
            else:
                named[name] = block
            holders[block], places[block] = run, at
            run.left += 1
        if run.left:
            self._keep(run, self.runs)
            self.live += run.left
            self._of_runs += count
            self._shorten()
        return run.left

    def _shorten(self) -> None:
        """Keep the bound of all runs' blocks. The oldest runs are made anew without their forgotten
        blocks: what is alive has at most as many blocks as the instance."""
        for _ in range(SHORTEN_LOOKS):
            if self._of_runs <= MOST_KEPT * self.blocks:
                return
            self._renew(next(iter(self.runs)))
        while self._of_runs > MOST_KEPT * self.blocks:
            self._drop(next(iter(self.runs)))

    def _renew(self, run: Run) -> None:
        """Make a run the newest one, in pieces if blocks of it are forgotten."""
        if run.left == len(run):
            del self.runs[run]
            self.runs[run] = None
            return
        self._remove(run)
        first = run.alive.find(1)
        while first >= 0:
            stop = _alive(run, first)
            piece = _piece(run, first, stop)
            for at, block in enumerate(piece.numbers):
                self.holders[block], self.places[block] = piece, at
            if self._memory.has(_nbytes(piece)):
                self._keep(piece, self.runs)
                self._of_runs += len(piece)
            else:
                for block in piece.numbers:
                    self._vacate(block)
            first = run.alive.find(1, stop)

    def _room(self, run: Run) -> bool:
        """Whether there is memory for a run. If not, forget what is said of its blocks: that is no
        more true."""
        if not self._memory.has(_nbytes(run)):
            for block in run.numbers:
                if not self._is_newer(block, run.sequence):
                    self._vacate(block)
        return self._memory.has(_nbytes(run))

    def _is_newer(self, block: int, sequence: int) -> bool:
        """Whether a run with a higher sequence holds a block, and the block is unchanged."""
        run = self.holders[block]
        if run is None or run.life != self.life or run.sequence <= sequence:
            return False
        return self.table.counters[block] == run.expected[self.places[block]]

    def _keep(self, run: Run, home: dict[Run, None]) -> None:
        run.life, run.home = self.life, home
        home[run] = None
        self._kept += 1
        self._memory.nbytes += _nbytes(run)

    def _unchanged(self, run: Run, first: int, stop: int) -> bool:
        """Whether the blocks [first, stop) of a run are unchanged. Forgets those that are not."""
        counters, count = self.table.counters, stop - first
        if count > 1:
            here = itemgetter(*run.numbers[first:stop])(counters)
            if here == run.expected[first:stop]:
                return True
        else:
            here = tuple(counters[block] for block in run.numbers[first:stop])
        changed = [
            block
            for block, was, now in zip(
                run.numbers[first:stop], run.expected[first:stop], here, strict=True
            )
            if was != now
        ]
        for block in changed:
            self._vacate(block)
        return not changed

    def _vacate(self, block: int) -> None:
        """Forget a block, if it is in a run."""
        run = self.holders[block]
        if run is None:
            return
        at = self.places[block]
        self.holders[block] = None
        self._unname(run.hash(at) + suffix(run.table), block)
        run.alive[at] = 0
        run.left -= 1
        if run.life == self.life:
            self.live -= 1
        if not run.left and run in run.home:
            self._remove(run)

    def _has_other(self, name: bytes) -> bool:
        """Whether an unchanged block has this name. Forgets those that have changed."""
        while (block := self.named.get(name)) is not None:
            run = self.holders[block]
            assert run is not None
            if run.life == self.life and self._unchanged(run, at := self.places[block], at + 1):
                return True
            if self.named.get(name) == block:
                self._vacate(block)
        return False

    def _unname(self, name: bytes, block: int) -> None:
        """A block has its name no more; another block may have it still."""
        spare = self._spare.get(name, [])
        if self.named[name] != block:
            spare.remove(block)
        elif spare:
            self.named[name] = spare.pop(0)
        else:
            del self.named[name]
        if not spare:
            self._spare.pop(name, None)

    def _drop(self, run: Run) -> None:
        """Forget a run."""
        for block, alive in zip(run.numbers, run.alive, strict=True):
            if alive and self.holders[block] is run:
                self._vacate(block)
        if run in run.home:
            self._remove(run)

    def _remove(self, run: Run) -> None:
        """A run has no block left, or none yet."""
        del run.home[run]
        self._memory.nbytes -= _nbytes(run)
        self._let_go()
        if run.life == self.life:
            if run.home is self._waiting:
                del self._awaited[_key(run)]
                self._of_waiting -= len(run)
            else:
                self._of_runs -= len(run)

    def _let_go(self) -> None:
        self._kept -= 1
        if not self._kept:
            self._memory.nbytes -= self.blocks * BLOCK_BYTES

    def _split(self, runs: dict[Run, None]) -> dict[Run, None]:
        """Take the newest runs that stay out of `runs`, into this life."""
        newest = list(islice(reversed(runs), RETRACT_LOOKS))
        kept = {run: None for run in reversed(newest) if run.sequence >= self._floor}
        for run in kept:
            del runs[run]
            run.home, run.life = kept, self.life
        return kept


def _nbytes(run: Run) -> int:
    return RUN_BYTES + len(run) * ENTRY_BYTES


def _piece(run: Run, first: int, stop: int) -> Run:
    """The blocks [first, stop) of a run, all alive, as a run."""
    return Run(
        run.table,
        run.first + first,
        run.sequence,
        run.hashes[first * m.HASH_BYTES : stop * m.HASH_BYTES],
        *run.packed(first, stop),
        run.numbers[first:stop],
        run.expected[first:stop],
        run.alive[first:stop],
        stop - first,
        run.life,
        run.home,
        run.agreed,
    )


def _key(run: Run) -> tuple[int, int, int]:
    return run.sequence, run.table, run.first


def _agreed(old: Run, new: Run) -> Run:
    """What two ranks say alike of one run from its first block on."""
    count = min(len(old), len(new))
    count = _common(old.hashes, 0, new.hashes, 0, count)
    same = zip(old.numbers[:count], new.numbers, old.expected, new.expected, strict=False)
    count = next((at for at, (a, b, c, d) in enumerate(same) if a != b or c != d), count)
    return Run(
        new.table,
        new.first,
        new.sequence,
        new.hashes[: count * m.HASH_BYTES],
        *new.packed(0, count),
        new.numbers[:count],
        new.expected[:count],
        new.alive[:count],
        0,
        0,
        {},
        old.agreed | new.agreed,
    )


def _alive(run: Run, at: int) -> int:
    """Where the blocks that are alive end, from `at` on."""
    end = run.alive.find(0, at)
    return len(run) if end < 0 else end


def _common(ours: bytes, at: int, theirs: bytes, first: int, count: int) -> int:
    """Count the equal hashes from numbers `at` and `first` on, of `count`."""
    size = m.HASH_BYTES
    ours, theirs = (
        ours[at * size : (at + count) * size],
        theirs[first * size : (first + count) * size],
    )
    if ours == theirs:
        return count
    same = 0
    while count - same > 1:
        half = (same + count) // 2
        if ours[same * size : half * size] == theirs[same * size : half * size]:
            same = half
        else:
            count = half
    return same
