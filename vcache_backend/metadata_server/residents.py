"""The blocks that instances have published in their KV caches, and where the longest hit of a
look-up ends among them. A pure state machine: no socket, no fd.

An answer promises nothing, since an instance may reuse a block at any time. Its blocks were
unchanged when it was made; a reader compares the instance's generation table after the copy."""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import lcm
from operator import itemgetter
from typing import NamedTuple

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.publications import (
    BLOCK_BYTES,
    COMPARED,
    Chunk,
    InstancePublications,
    Piece,
    suffix,
)
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable

ONE_FULL = [m.BlockTable("full")]
News = tuple[m.InstanceId, bytes, bytes]
"""An instance, the last hash of a chunk that this instance holds, too, and the chunk's `COPY`."""


MAX_LOOKS = 16_384
"""The most looks into tables of one look-up, some milliseconds."""
_SCANNED = 64
"""How many blocks are looked for at once before a missing block."""


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


class Covered(NamedTuple):
    """The leading blocks of a table that are somewhere. `cut`: there may be more, but the answer
    is full, or the look-up took long enough."""

    stop: int
    pieces: list[Piece]
    cut: bool = False


Others = Sequence[InstancePublications]


class HitSearch:
    """One look-up among instances that have the same block tables."""

    def __init__(self, hashes: bytes, tables: Sequence[m.BlockTable]) -> None:
        self.hashes, self.tables, self.left = hashes, tables, MAX_LOOKS
        self._of = dict[int, bytes]()
        self._names = dict[tuple[int, int], list[bytes]]()

    def answer(self, request: m.Find, others: Others, present: bytes, room: int) -> m.Found:
        """present: a byte for each chunk, whether the pool has it. room: for how many blocks the
        answer has room."""
        tables, each = self.tables, request.each
        count = len(request.hashes) // m.HASH_BYTES
        full = [number for number, table in enumerate(tables) if table.kind == "full"]
        alone = len(tables) == len(full) == 1
        room -= sum(
            4 + min(table.reach, count // table.scale) for table in tables if table.kind != "full"
        )
        found, pieces, cut = count, list[Piece](), False
        for number in full:
            part = self.covered(
                number, others, present, each, room // len(full), m.MAX_REPLICAS if alone else 1
            )
            found, cut = min(found, part.stop * tables[number].scale), part.cut
            pieces += part.pieces
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
        runs.sort(key=itemgetter(0, 1))
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
    ) -> Covered:
        """Find a table's leading blocks in instances or whole chunks of the pool.

        pooled: a byte for each chunk of `each` hashes. room: for how many blocks the answer has
        room; a new piece takes that of 3. Each turn goes on to where instances change."""
        hashes, pieces, going, at = self.of(table), list[Piece](), list[Piece](), 0
        count, size = len(hashes) // m.HASH_BYTES, m.HASH_BYTES
        while at < count:
            if self.left <= 0 or room <= 0:
                return Covered(at, pieces, True)
            going = [one for one in going if one.stop > at]
            name, here = hashes[at * size : (at + 1) * size] + suffix(table), len(going)
            for there in others if here < replicas else ():
                self.left -= 1
                if name in there.named and all(one.there is not there for one in going[:here]):
                    piece = self._follow(there, table, at, count)
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
                    return Covered(at, pieces, self.left <= 0)
            if len(going) * (stop - at) > room:
                return Covered(at + max(0, room) // len(going), pieces, True)
            room -= len(going) * (stop - at)
            at = stop
        return Covered(at, pieces)

    def _follow(self, there: InstancePublications, table: int, first: int, stop: int) -> Piece:
        piece, self.left = there.follow(table, self.of(table), first, stop, self.left)
        return piece

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
        while end > least and self.left > 0:
            pieces = list[Piece]()
            for number, table in tables:
                first, stop = needed(table, end)
                piece = self._follow(there, number, first, stop)
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
        named = there.named
        while stop > 0 and self.left > 0:
            first = (stop - 1) // _SCANNED * _SCANNED
            here = bytes(map(named.__contains__, self._part(table, first)[: stop - first]))
            self.left -= _SCANNED // COMPARED
            if (last := here.rfind(1)) >= 0:
                return first + last + 1
            stop = first
        return 0

    def _part(self, table: int, first: int) -> list[bytes]:
        """The names of `_SCANNED` blocks of a table from `first` on."""
        if (table, first) not in self._names:
            size, end = m.HASH_BYTES, suffix(table)
            hashes = self.of(table)[first * size : (first + _SCANNED) * size]
            self._names[table, first] = [
                name + end for (name,) in struct.iter_unpack(f"{size}s", hashes)
            ]
        return self._names[table, first]


class ResidentDirectory:
    """The published blocks of all instances."""

    MAX_BYTES = 1 << 30
    """About the most server memory for the publications of all instances."""
    MAX_TOLD = 256
    """The most copies in one answer."""
    MAX_COPIES = 2048
    """The most copies of which an instance has yet to be told. Older copies are dropped."""
    MAX_NOTED = 512
    """The most copies of which one publication tells other instances. Further instances, chosen at
    random, hear of a later copy."""
    FOUND_BLOCKS = (
        m.MAX_MESSAGE_BYTES - 16_384 - MAX_TOLD * (m.INSTANCE_BYTES + m.COPY.size + 8)
    ) // (m.NUMBER_BYTES + m.GENERATION_BYTES)
    """The most resident blocks in one answer. Copies and the other fields take the rest."""

    def __init__(
        self,
        counters: Counter[str],
        arrived: Callable[[Iterable[m.ChunkKey]], None] = lambda keys: None,
    ) -> None:
        """arrived: called with chunks (keys of rank 0) that all ranks have published."""
        self._counters, self._arrived = counters, arrived
        self.of: dict[m.InstanceId, InstancePublications] = {}
        self._news: dict[m.InstanceId, deque[News]] = {}
        """For each instance, the oldest first."""

    def has(self, instance: m.InstanceId, key: m.ChunkKey) -> bool:
        """Whether an instance has published the last block of a chunk."""
        own = self.of.get(instance)
        return own is not None and own.has(key[m.NAMESPACE_BYTES : -m.RANK_BYTES])

    def open(self, join: m.Join, table: Callable[[], ForeignTable], new: bool = False) -> None:
        """Add an instance. Earlier publications stay, unless the request has changed or the
        instance is `new`. Refuse an instance whose blocks exceed the server's memory.

        table: maps the instance's generation table; what it raises leaves everything as it is."""
        known = self.of.get(join.instance)
        if new or known is None or known.join != join:
            others = sum(one.blocks for name, one in self.of.items() if name != join.instance)
            if (others + join.blocks) * BLOCK_BYTES > self.MAX_BYTES:
                raise Refused(f"the server has no memory for {join.blocks:,} more blocks")
            made = InstancePublications(join, table())
            self.close(join.instance)
            self.of[join.instance] = made
            self._news[join.instance] = deque(maxlen=self.MAX_COPIES)

    def close(self, instance: m.InstanceId) -> None:
        self.of.pop(instance, None)
        self._news.pop(instance, None)

    def publish(self, request: m.Publish) -> int:
        """Publish blocks of an instance. Returns how many; 0 if the instance has not joined. Refuse
        impossible runs."""
        publications = self.of.get(request.instance)
        if publications is None:
            return 0
        ends = publications.publish(request.rank, request.runs)
        taken = sum(run.count for run in request.runs)
        self._counters["published"] += taken
        namespace, rank = publications.namespace, bytes(m.RANK_BYTES)
        self._arrived([m.ChunkKey(namespace + end + rank) for end in ends])
        if publications.tables == ONE_FULL:
            self._note_copies(publications, ends)
        return taken

    def clear(self, namespace: bytes) -> int:
        """Forget the publications of a namespace, or all with b"". Returns how many blocks."""
        of = [one for one in self.of.values() if namespace in (b"", one.namespace)]
        return sum(one.clear() for one in of)

    # ---- chunks that two instances hold

    def copies(self, instance: m.InstanceId) -> list[m.Copies]:
        """Take the oldest news for an instance's scheduler: chunks that another instance holds as
        well. At most `MAX_TOLD`."""
        news, told = self._news.get(instance, deque[News]()), list[m.Copies]()
        taken = [news.popleft() for _ in range(min(self.MAX_TOLD, len(news)))]
        for other, noted in groupby(taken, itemgetter(0)):
            there = self.of.get(other)
            packed = b"".join(
                [packed for _, end, packed in noted if there is not None and there.has(end)]
            )
            if packed:
                told.append(m.Copies(other, packed))
        return told

    def _note_copies(self, publications: InstancePublications, ends: list[bytes]) -> None:
        """Note which of an instance's newly published chunks other instances hold, too, for both
        sides: for the publisher one holder of each chunk, for the others `MAX_NOTED` notes in all.
        The end of a prefix comes first, and so leaves first. ends: the last hash of each chunk."""
        others = [
            there
            for there in self._alike(publications.join)
            if there is not publications and there.each == publications.each
        ]
        instance = publications.join.instance
        own = {end: chunk for end in ends[::-1] if (chunk := publications.chunk(end)) is not None}
        left, alone = self.MAX_NOTED, dict.fromkeys(own)
        most = MAX_LOOKS // max(1, len(others))
        for there in others:
            other = there.join.instance
            shared = [end for end in list(own if left else alone)[:most] if there.has(end)]
            for end in shared:
                # Packed here, and not when they are told: a scheduler waits for that.
                if (theirs := there.chunk(end)) is None:
                    continue
                if left:
                    self._news[other].append((instance, end, _copy(theirs, own[end])))
                    left -= 1
                if end in alone:
                    self._news[instance].append((other, end, _copy(own[end], theirs)))
                    del alone[end]

    def _alike(self, join: m.Join) -> Others:
        """The instances that hold blocks which instances with this request may read, in random
        order."""
        alike = [
            there
            for there in self.of.values()
            if there.named and there.whole and there.namespace == join.namespace
            if there.ranks == join.ranks and there.tables == join.tables and not there.table.dead
        ]
        random.shuffle(alike)
        return alike

    # ---- look-up

    def find(self, request: m.Find, keys: list[m.ChunkKey], pooled: Directory) -> m.Found:
        """Find what is in the pool for all ranks, or resident in instances other than the asker.
        keys: of the whole chunks."""
        others = self._others(request)
        present = b""
        if pooled.has_any(request.namespace):
            present = bytes(pooled.of_all(keys, request.ranks))
        if others:
            search = HitSearch(request.hashes, others[0].tables)
            found = search.answer(request, others, present, self.FOUND_BLOCKS)
            self._counters["resident_hits"] += found.end // request.each if found.residents else 0
            return found
        present = present.partition(b"\0")[0]
        own = self.of.get(request.instance)
        plain = request.pool_only or own is None or own.tables == ONE_FULL
        pooled_only = len(present) * request.each
        return m.Found(pooled_only, min(pooled_only, request.limit) if plain else 0, present)

    def _others(self, request: m.Find) -> Others:
        """The instances that the asker may read. All have the same tables: the asker's, or those of
        one of them."""
        if request.pool_only or not request.hashes:
            return []
        own = self.of.get(request.instance)
        if own is not None:
            joins = [own.join]
        else:
            joins = [there.join for there in self.of.values() if there.whole and there.named]
        for join in joins:
            if join.namespace == request.namespace and join.ranks == request.ranks:
                return [there for there in self._alike(join) if there is not own]
        return []


def _copy(own: Chunk, theirs: Chunk) -> bytes:
    return m.COPY.pack(*own, *theirs[:2])
