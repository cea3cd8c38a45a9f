"""What a look-up finds in KV caches and in the pool, and where the longest hit ends. Pure.

An answer promises nothing, since an instance may reuse a block at any time. Its blocks were
unchanged when it was made; a reader compares the instance's generation table after the copy."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import lcm
from operator import attrgetter

from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.publications import (
    ONE_FULL,
    InstancePublications,
    Piece,
    suffix,
)
from vcache_backend.protocol import messages as m

MAX_TOLD = 256
"""The most copies in one answer."""
FOUND_BLOCKS = (m.MAX_MESSAGE_BYTES - 16_384 - MAX_TOLD * (m.INSTANCE_BYTES + m.COPY.size + 8)) // (
    m.NUMBER_BYTES + m.GENERATION_BYTES
)
"""The most resident blocks in one answer. Copies and the other fields take the rest."""


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


Others = Sequence[InstancePublications]


def find(
    request: m.Find,
    keys: list[m.ChunkKey],
    pool: Directory,
    own: InstancePublications | None,
    others: Others,
) -> m.Found:
    """Find what is in the pool for all ranks, or in the KV caches of others. keys: of the whole
    chunks. own: of the asker. others: those that the asker may read; all have the same tables."""
    present = bytes(pool.of_all(keys, request.ranks)) if len(pool) else b""
    if others:
        return HitSearch(request.hashes, others[0].tables).answer(request, others, present)
    present = present.partition(b"\0")[0]
    pooled = len(present) * request.each
    plain = request.pool_only or own is None or own.tables == ONE_FULL
    return m.Found(pooled, min(pooled, request.limit) if plain else 0, present)


class HitSearch:
    """One look-up among instances that have the same block tables."""

    def __init__(self, hashes: bytes, tables: Sequence[m.BlockTable]) -> None:
        self.hashes, self.tables = hashes, tables
        self._of = dict[int, bytes]()
        self._names = dict[int, list[bytes]]()

    def answer(self, request: m.Find, others: Others, present: bytes) -> m.Found:
        """present: a byte for each chunk, whether the pool has it."""
        tables, each = self.tables, request.each
        count = len(request.hashes) // m.HASH_BYTES
        full = [number for number, table in enumerate(tables) if table.kind == "full"]
        alone = len(tables) == len(full) == 1
        room = FOUND_BLOCKS - sum(
            4 + min(table.reach, count // table.scale) for table in tables if table.kind != "full"
        )
        found, pieces, cut = count, list[Piece](), False
        for number in full:
            stop, some, cut = self.covered(
                number, others, present, each, room // len(full), m.MAX_REPLICAS if alone else 1
            )
            found = min(found, stop * tables[number].scale)
            pieces += some
        if alone and cut:
            found -= found % each
        end = min(found, request.limit)
        if alone:
            end -= end % tables[0].scale
        else:
            end, ends = self.best(end, others)
            pieces += ends
        if not full:
            found = max(end, each * len(present[: present.find(0)] if 0 in present else present))
        runs = [piece.packed(end // tables[piece.table].scale) for piece in pieces]
        runs = [run for run in runs if run.blocks]
        runs.sort(key=attrgetter("table", "first"))
        chunks = found // each
        return m.Found(found, end, present[:chunks] or bytes(chunks), runs, cut=alone and cut)

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
    ) -> tuple[int, list[Piece], bool]:
        """Find a table's leading blocks in instances or whole chunks of the pool. Returns where
        they stop, the pieces in instances, and whether there may be more, but the answer is full.

        pooled: a byte for each chunk of `each` hashes. room: for how many blocks the answer has
        room; a new piece takes that of 3. Each turn goes on to where instances change."""
        hashes, pieces, going, at = self.of(table), list[Piece](), list[Piece](), 0
        count, size = len(hashes) // m.HASH_BYTES, m.HASH_BYTES
        while at < count:
            if room <= 0:
                return at, pieces, True
            going = [one for one in going if one.stop > at]
            name, here = hashes[at * size : (at + 1) * size] + suffix(table), len(going)
            for there in others if here < replicas else ():
                if name in there.named and all(one.there is not there for one in going[:here]):
                    piece = there.follow(table, hashes, at, count)
                    if piece.stop > at:
                        going.append(piece)
                        if len(going) == replicas:
                            break
            pieces += going[here:]
            room -= 3 * (len(going) - here)
            stop = min((one.stop for one in going), default=at)
            if not going:
                stop = self._pooled(table, at, pooled, each)
                if stop == at:
                    break
            if len(going) * (stop - at) > room:
                return at + max(0, room) // len(going), pieces, True
            room -= len(going) * (stop - at)
            at = stop
        return at, pieces, False

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
        for there in others:
            end, pieces = self._longest(limit, best, there)
            if end > best:
                best, whose = end, pieces
        return best, whose

    def _longest(
        self, limit: int, least: int, there: InstancePublications
    ) -> tuple[int, list[Piece]]:
        """Where an instance's longest hit ends, and its pieces; 0 unless it is longer than `least`.

        Goes from the longest end down. An end is a common one of all tables' blocks, and asks
        first for what rules most ends out."""
        unit = lcm(*(table.scale for table in self.tables))
        tables = [one for one in enumerate(self.tables) if one[1].kind != "full"]
        tables.sort(key=lambda one: one[1].reach)
        end = limit // unit * unit
        while end > least:
            pieces = list[Piece]()
            for number, table in tables:
                first, stop = needed(table, end)
                piece = there.follow(number, self.of(number), first, stop)
                if piece.stop < stop:  # all hits that end behind this block need it
                    lacks = self._below(there, number, piece.stop)
                    end = min(lacks * table.scale, end - 1) // unit * unit
                    break
                pieces.append(piece)
            else:
                return end, pieces
        return 0, []

    def _below(self, there: InstancePublications, table: int, stop: int) -> int:
        """Behind how many of the first `stop` blocks a hit can end."""
        if self.tables[table].kind == "local":  # its hits need nothing at the end of a chunk
            return stop
        if table not in self._names:
            hashes = struct.iter_unpack(f"{m.HASH_BYTES}s", self.of(table))
            self._names[table] = [name + suffix(table) for (name,) in hashes]
        names, named = self._names[table], there.named
        return next((at for at in range(stop, 0, -1) if names[at - 1] in named), 0)
