"""The blocks that instances have published in their KV caches. A pure state machine: no socket, no
fd.

An answer promises nothing, since an instance may reuse a block at any time. Its blocks were
unchanged when it was made; a reader compares the instance's generation table after the copy."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.hits import MAX_LOOKS, HitSearch, Others, Piece
from vcache_backend.metadata_server.publications import (
    BLOCK_BYTES,
    Chunk,
    ForeignTable,
    InstancePublications,
)
from vcache_backend.protocol import messages as m

ONE_FULL = [m.BlockTable("full")]
News = tuple[m.InstanceId, bytes, bytes]
"""An instance, the last hash of a chunk that this instance holds, too, and the chunk's `COPY`."""


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
            self._note_copies(request.instance, publications, ends)
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

    def _note_copies(
        self, instance: m.InstanceId, publications: InstancePublications, ends: list[bytes]
    ) -> None:
        """Note which of an instance's newly published chunks other instances hold, too, for both
        sides: for the publisher one holder of each chunk, for the others `MAX_NOTED` notes in all.
        The end of a prefix comes first, and so leaves first. ends: the last hash of each chunk."""
        others = [
            (other, there)
            for other, there in self._alike(publications.join)
            if other != instance and there.each == publications.each
        ]
        own = {end: chunk for end in ends[::-1] if (chunk := publications.chunk(end)) is not None}
        left, alone = self.MAX_NOTED, dict.fromkeys(own)
        most = MAX_LOOKS // max(1, len(others))
        for other, there in others:
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
            (other, there)
            for other, there in self.of.items()
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
            return self._resident(request, others, present)
        present = present.partition(b"\0")[0]
        own = self.of.get(request.instance)
        plain = request.pool_only or own is None or own.tables == ONE_FULL
        found = len(present) * request.each
        return m.Found(found, min(found, request.limit) if plain else 0, present)

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
                alike = self._alike(join)
                return [one for one in alike if one[0] != request.instance]
        return []

    def _resident(self, request: m.Find, others: Others, present: bytes) -> m.Found:
        tables, each = others[0][1].tables, request.each
        question, count = HitSearch(request.hashes, tables), len(request.hashes) // m.HASH_BYTES
        full = [number for number, table in enumerate(tables) if table.kind == "full"]
        alone = len(tables) == len(full) == 1
        room = self.FOUND_BLOCKS - sum(
            4 + min(table.reach, count // table.scale) for table in tables if table.kind != "full"
        )
        found, pieces, cut = count, list[Piece](), False
        for number in full:
            part = question.covered(
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
            end, ends = question.best(end, others)
            pieces += ends
        if not full:
            found = max(end, each * len(present[: present.find(0)] if 0 in present else present))
        runs = [piece.packed(end // tables[piece.table].scale) for piece in pieces]
        runs = [run for run in runs if run.blocks]
        runs.sort(key=itemgetter(0, 1))
        self._count(runs, tables, each)
        chunks = found // each
        return m.Found(found, end, present[:chunks] or bytes(chunks), runs, cut=alone and cut)

    def _count(self, runs: list[m.ResidentRun], tables: list[m.BlockTable], each: int) -> None:
        """Count the chunks that were found in instances, by their first table."""
        hashes = stop = 0
        for run in runs:
            if run.table != runs[0].table:
                break
            hashes += max(0, run.stop - max(stop, run.first)) * tables[run.table].scale
            stop = max(stop, run.stop)
        self._counters["resident_hits"] += hashes // each


def _copy(own: Chunk, theirs: Chunk) -> bytes:
    return m.COPY.pack(*own, *theirs[:2])
