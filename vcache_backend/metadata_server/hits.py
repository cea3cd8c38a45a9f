"""Where the longest hit of a look-up ends, and the blocks that it needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import lcm
from typing import NamedTuple

import msgspec

from vcache_backend.metadata_server.publications import InstancePublications, suffix
from vcache_backend.protocol import messages as m

MAX_LOOKS = 16_384
"""The most looks into tables of one look-up, some milliseconds. A run that is found counts as
`_RUN` looks, and so does comparing `_COMPARED` of its blocks."""
_RUN, _COMPARED = 8, 128
_SCANNED = 64
"""How many names are looked for at once below a missing block."""

Bound = Callable[[int, int, int], int]
"""Of a table and its blocks [first, stop), which a hit needs: -1 if all are there; otherwise the
number of leading blocks behind which no hit can end."""


def needed(table: m.BlockTable, end: int) -> tuple[int, int]:
    """The blocks [first, stop) that a hit which ends after `end` hashes needs of a table."""
    stop = end // table.scale
    match table.kind:
        case "full":
            return 0, stop
        case "local":
            return stop - stop % max(1, table.reach), stop
        case _:
            return max(0, stop - table.reach), stop


def longest_end(tables: Sequence[m.BlockTable], limit: int, bound: Bound) -> int:
    """Where the longest hit ends, in hashes: at most at `limit`, at a common end of all tables'
    blocks, with all that the tables other than full ones need.

    Goes from the longest end down, and asks little of an end that has no last block."""
    unit = lcm(*(table.scale for table in tables))
    others = [(number, table) for number, table in enumerate(tables) if table.kind != "full"]
    others.sort(key=lambda one: one[1].reach)  # what rules most ends out comes first
    end = limit - limit % unit
    while end > 0:
        for number, table in others:
            lacks = bound(number, *needed(table, end))
            if lacks >= 0:
                end = min(lacks * table.scale, end - 1) // unit * unit
                break
        else:
            return end
    return 0


class Piece(msgspec.Struct):
    """A `ResidentRun` that is being built: the blocks [first, stop)."""

    table: int
    first: int
    stop: int
    instance: m.InstanceId
    there: InstancePublications
    blocks: list[bytes]
    generations: list[bytes]

    def packed(self, stop: int) -> m.ResidentRun:
        """The run before block `stop`, where the hit ends; maybe empty."""
        packs = b"".join(self.blocks), b"".join(self.generations)
        run = m.ResidentRun(self.table, self.first, self.instance, *packs)
        return run.cut(self.first, max(self.first, min(stop, self.stop)))


class Covered(NamedTuple):
    """The leading blocks of a table that are somewhere. `cut`: there may be more, but the answer
    is full, or the look-up took long enough."""

    stop: int
    pieces: list[Piece]
    cut: bool = False


Others = Sequence[tuple[m.InstanceId, InstancePublications]]


class HitSearch:
    """One look-up among instances that have the same block tables."""

    def __init__(self, hashes: bytes, tables: Sequence[m.BlockTable]) -> None:
        self.hashes, self.tables, self.left = hashes, tables, MAX_LOOKS
        self._of = dict[int, bytes]()
        self._names = dict[int, list[bytes]]()

    def of(self, table: int) -> bytes:
        """The hashes of a table's blocks, packed."""
        if (scale := self.tables[table].scale) == 1:
            return self.hashes
        if table not in self._of:
            size = m.HASH_BYTES
            ends = range(scale * size, len(self.hashes) + 1, scale * size)
            self._of[table] = b"".join([self.hashes[end - size : end] for end in ends])
        return self._of[table]

    # ---- tables of full attention

    def covered(
        self, table: int, others: Others, pooled: bytes, each: int, room: int, replicas: int
    ) -> Covered:
        """Find a table's leading blocks in instances or whole chunks of the pool.

        pooled: a byte for each chunk of `each` hashes. room: for how many blocks the answer has
        room; a new piece takes that of 3. Each turn goes on to where instances change."""
        hashes, end, pieces, going, at = (
            self.of(table),
            suffix(table),
            list[Piece](),
            list[Piece](),
            0,
        )
        count, size = len(hashes) // m.HASH_BYTES, m.HASH_BYTES
        while at < count:
            if self.left <= 0 or room <= 0:
                return Covered(at, pieces, True)
            name = hashes[at * size : (at + 1) * size] + end
            going = [one for one in going if one.stop > at or self._extend(one, name, hashes)]
            if len(going) < replicas:
                for new in self._begin(table, at, name, hashes, others, going, replicas):
                    room -= 3
                    pieces.append(new)
                    going.append(new)
            stop = min((one.stop for one in going), default=at)
            if not going:
                stop = self._pooled(table, at, pooled, each)
                if stop == at:
                    break
            if len(going) * (stop - at) > room:
                return Covered(at + max(0, room) // len(going), pieces, True)
            room -= len(going) * (stop - at)
            at = stop
        return Covered(at, pieces)

    def _begin(
        self,
        table: int,
        at: int,
        name: bytes,
        hashes: bytes,
        others: Others,
        going: Sequence[Piece],
        replicas: int,
    ) -> list[Piece]:
        """Begin pieces in further instances, as far as `replicas` allow."""
        begun, here = list[Piece](), [one.instance for one in going]
        for instance, there in others:
            if len(begun) + len(going) == replicas:
                break
            self.left -= 1
            if name in there.named and instance not in here:
                piece = Piece(table, at, at, instance, there, [], [])
                if self._extend(piece, name, hashes):
                    begun.append(piece)
        return begun

    def _extend(self, piece: Piece, name: bytes, hashes: bytes) -> bool:
        """Add the run in which the piece goes on; False if it ends."""
        while (found := piece.there.at(name)) is not None:
            run, at = found
            count = piece.there.following(run, at, hashes, piece.stop)
            self.left -= _RUN + count // _COMPARED * _RUN
            if count:
                blocks, generations = run.packed(at, at + count)
                piece.blocks.append(blocks)
                piece.generations.append(generations)
                piece.stop += count
                return True
            # It has changed. Another block may have the name.
        return False

    def _pooled(self, table: int, at: int, pooled: bytes, each: int) -> int:
        """How far whole chunks of the pool reach from a block on."""
        scale = self.tables[table].scale
        gap = pooled.find(0, at * scale // each)
        end = (gap if gap >= 0 else len(pooled)) * each // scale
        return max(at, end)

    # ---- other tables

    def best(self, limit: int, others: Others) -> tuple[int, list[Piece]]:
        """Where the longest hit ends of which one instance has all that it needs of tables that
        are not full, and this."""
        best, whose = 0, list[Piece]()
        for instance, there in others:
            end = longest_end(self.tables, limit, partial(self._bound, there, best))
            if end > best and (pieces := self._pieces(end, instance, there)) is not None:
                best, whose = end, pieces
        return best, whose

    def _pieces(
        self, end: int, instance: m.InstanceId, there: InstancePublications
    ) -> list[Piece] | None:
        """What a hit needs of the instance's tables that are not full; None if it has just gone."""
        made = list[Piece]()
        for number, table in enumerate(self.tables):
            first, stop = needed(table, end)
            if table.kind != "full" and first < stop:
                hashes, last = self.of(number), suffix(number)
                piece = Piece(number, first, first, instance, there, [], [])
                while piece.stop < stop:
                    at = piece.stop * m.HASH_BYTES
                    if not self._extend(piece, hashes[at : at + m.HASH_BYTES] + last, hashes):
                        return None
                made.append(piece)
        return made

    def _bound(
        self, there: InstancePublications, best: int, table: int, first: int, stop: int
    ) -> int:
        """See `Bound`. best: a hit that is not longer than so many hashes is not looked for."""
        if self.left <= 0 or stop * self.tables[table].scale <= best:
            return 0
        hashes, end, size = self.of(table), suffix(table), m.HASH_BYTES
        at = stop
        while at > first:
            found = there.at(hashes[(at - 1) * size : at * size] + end)
            if found is None:
                return self._below(there, table, at - 1)
            # 0: it has changed, and another block may have the name.
            count = there.preceding(*found, hashes, at, at - first)
            self.left -= _RUN + count // _COMPARED * _RUN
            at -= count
        return -1

    def _below(self, there: InstancePublications, table: int, stop: int) -> int:
        """Behind how many of the first `stop` blocks a hit can end."""
        if self.tables[table].kind == "local":  # its hits need nothing at the end of a chunk
            return stop
        names = self._reversed(table)
        start = len(names) - stop
        while start < len(names) and self.left > 0:
            here = list(map(there.named.__contains__, islice(names, start, start + _SCANNED)))
            self.left -= _SCANNED // 2
            if True in here:
                return len(names) - start - here.index(True)
            start += _SCANNED
        return 0

    def _reversed(self, table: int) -> list[bytes]:
        """The names of a table's blocks, from the last to the first."""
        if table not in self._names:
            hashes, end, size = self.of(table), suffix(table), m.HASH_BYTES
            starts = range(len(hashes) - size, -1, -size)
            self._names[table] = [hashes[at : at + size] + end for at in starts]
        return self._names[table]
