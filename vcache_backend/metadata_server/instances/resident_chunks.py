"""The chunks that instances have published in their KV caches. A pure state machine: no socket, no
fd.

An answer promises nothing, since an instance may reuse a block at any time. A reader checks the
instance's generation table before and after it reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from operator import itemgetter

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.instances.published_chunks import (
    BLOCK_BYTES,
    InstancePublications,
    PublishedChunk,
    Table,
)
from vcache_backend.metadata_server.pool.backlog import Backlog, Steps
from vcache_backend.metadata_server.pool.chunks import Chunks
from vcache_backend.protocol import messages as m

MAX_BYTES = 1 << 30
"""About the most server memory for all instances together."""
MAX_CELLS = 16_384
"""The most keys times instances in one look-up. Further keys need another look-up."""
COPY_BYTES = m.INSTANCE_BYTES + m.COPY.size + 8
"""The most bytes of a copy in a message."""
MAX_TOLD = 256
"""The most copies in one answer."""
MAX_NOTED = 512
"""The most copies of which one publication tells other instances. Further instances, chosen at
random, hear of a later copy."""
FOUND_BYTES = m.MAX_MESSAGE_BYTES - 8192 - MAX_TOLD * COPY_BYTES
"""Bytes for the resident chunks in one answer. The message's other fields take the rest."""
_RESIDENT_BYTES = 36
"""The most bytes of a `ResidentRun` in a message, besides its blocks and generations."""


Column = list[PublishedChunk | None]
"""One instance's publication for each key of a look-up, or None."""


class ResidentDirectory:
    """The published chunks of all instances, at most `max_chunks`."""

    def __init__(
        self,
        backlog: Backlog,
        counters: Counter[str],
        max_chunks: int,
        arrived: Callable[[Iterable[m.ChunkKey]], None] = lambda keys: None,
    ) -> None:
        """arrived: called with chunks (keys of rank 0) that all ranks have published."""
        self._backlog, self._counters, self._max_chunks = backlog, counters, max_chunks
        self._arrived = arrived
        self._of: dict[m.InstanceId, InstancePublications] = {}
        self.nbytes = 0
        """About how many bytes all publications take."""

    def of(self, instance: m.InstanceId) -> Collection[m.ChunkKey]:
        """The chunks that look-ups can return from an instance once it is whole, keys of rank 0."""
        publications = self._of.get(instance)
        return () if publications is None else publications.complete

    def open(self, join: m.Join) -> None:
        """Add an instance. Earlier publications stay, unless the request has changed. Refuse an
        instance whose blocks exceed the server's memory."""
        earlier = self._of.get(join.instance)
        if earlier is None or earlier.join != join:
            self.close(join.instance)
            if self.nbytes + join.blocks * BLOCK_BYTES > MAX_BYTES:
                raise Refused(f"the server has no memory for {join.blocks:,} more blocks")
            self._of[join.instance] = InstancePublications(join)
            self._settle(self._of[join.instance])

    def show(self, instance: m.InstanceId, whole: bool) -> None:
        """Set whether look-ups may return chunks of this instance."""
        if (publications := self._of.get(instance)) is not None:
            publications.whole = whole

    def empty(self, instance: m.InstanceId) -> None:
        if (publications := self._of.get(instance)) is not None:
            self._forget(publications, publications.clear())

    def close(self, instance: m.InstanceId) -> None:
        self.empty(instance)
        if (publications := self._of.pop(instance, None)) is not None:
            publications.closed = True
            self._settle(publications)

    def publish(self, rank: int, request: m.Publish) -> int:
        """Publish chunks of an instance. Returns how many were taken; 0 if the instance has not
        joined. Refuse impossible lengths or numbers."""
        publications = self._of.get(request.instance)
        if publications is None:
            return 0
        room = self._max_chunks - sum(map(len, self._of.values()))
        most = min(room, (MAX_BYTES - self.nbytes) // publications.chunk_bytes)
        taken = publications.publish(rank, request, max(0, most))
        self._settle(publications)
        self._counters["published"] += taken
        complete = [key for key in m.of_rank(request.keys, 0) if key in publications.complete]
        self._arrived(complete)
        self._note_copies(request.instance, publications, complete)
        return taken

    def retract(self, instance: m.InstanceId, sequence: int) -> int:
        """Void an instance's publications with a lower sequence, including late arrivals. Returns
        how many chunks were voided."""
        publications = self._of.get(instance)
        if publications is None:
            return 0
        tables = publications.retract(sequence)
        self._forget(publications, tables)
        return sum(map(len, tables))

    def clear(self, namespace: bytes) -> int:
        """Forget the publications of a namespace, or all with b"". Returns how many."""
        dropped = 0
        for publications in self._of.values():
            if not namespace or publications.namespace == namespace:
                tables = publications.clear()
                dropped += len(tables[0])
                self._forget(publications, tables)
        return dropped

    def _forget(self, publications: InstancePublications, tables: tuple[Table, Table]) -> None:
        """Remove void chunks from memory in later turns. Until then the chunks count."""
        if any(tables):  # an empty task would let clients fill the backlog for nothing
            self._backlog.later(self._forgetting(publications, tables))

    def _forgetting(self, publications: InstancePublications, tables: tuple[Table, Table]) -> Steps:
        for _ in publications.forget(tables):
            self._settle(publications)
            yield
        self._settle(publications)

    def _settle(self, publications: InstancePublications) -> None:
        """Count the present size of the publications."""
        self.nbytes += publications.nbytes - publications.counted
        publications.counted = publications.nbytes

    # ---- chunks that two instances hold

    def copies(self, instance: m.InstanceId) -> list[m.Copies]:
        """Take the oldest news for an instance's scheduler: chunks that another instance holds as
        well. At most `MAX_TOLD`."""
        publications, told = self._of.get(instance), list[m.Copies]()
        taken = publications.take_copies(MAX_TOLD) if publications is not None else []
        for other, news in groupby(taken, itemgetter(0)):
            there = self.of(other)
            if packed := b"".join([packed for _, key, packed in news if key in there]):
                told.append(m.Copies(other, packed))
        return told

    def _note_copies(
        self, instance: m.InstanceId, publications: InstancePublications, keys: list[m.ChunkKey]
    ) -> None:
        """Note which of an instance's newly published chunks other instances hold, too, for both
        sides: for the publisher one holder of each chunk, for the others `MAX_NOTED` notes in all.
        The end of a prefix comes first, and so leaves first."""
        others = self._alike(instance, publications.namespace, publications.ranks)
        random.shuffle(others)
        keys, left = keys[::-1], MAX_NOTED
        alone = dict.fromkeys(keys)
        for other, there in others:
            shared = list(filter(there.complete.__contains__, keys if left else alone))
            there.note_copies(instance, publications.complete, shared[:left])
            left -= min(left, len(shared))
            first = list(filter(alone.__contains__, shared))
            publications.note_copies(other, there.complete, first)
            alone = {key: None for key in alone if key not in there.complete}

    def _alike(
        self, instance: m.InstanceId, namespace: bytes, ranks: int
    ) -> list[tuple[m.InstanceId, InstancePublications]]:
        """The other instances whose chunks `instance` may read."""
        return [
            (other, there)
            for other, there in self._of.items()
            if there.complete and there.whole and there.namespace == namespace
            if there.ranks == ranks and other != instance
        ]

    # ---- look-up

    def find(self, request: m.Find, pooled: Chunks) -> m.Found:
        """Find the leading chunks that are in the pool for all ranks, or resident in an instance
        other than the asker."""
        keys = request.keys
        others = list[tuple[m.InstanceId, InstancePublications]]()
        if keys and not request.pool_only:
            namespace = keys[0][: m.NAMESPACE_BYTES]
            others = self._alike(request.instance, namespace, request.ranks)
            random.shuffle(others)
        keys = keys[: MAX_CELLS // max(1, len(others))]
        columns = {
            instance: column
            for instance, there in others
            if (column := _column(there.complete, keys))
        }
        if columns:
            each = max(self._of[instance].each for instance in columns)
            answer = _assemble(pooled.of_all(keys, request.ranks), columns, each)
        else:
            chunks = pooled.leading_of_all(keys, request.ranks)
            answer = m.Found(b"\1" * chunks)
        cut = len(answer.pooled) == len(keys) < len(request.keys)
        return msgspec.structs.replace(answer, cut=True) if cut else answer


def _column(published: dict[m.ChunkKey, PublishedChunk], keys: list[m.ChunkKey]) -> Column:
    """One instance's publication for each key; empty if the instance holds no such chunk."""
    column = list(map(published.get, keys))
    return column if column.count(None) < len(column) else []


class _Run(msgspec.Struct):
    """A `ResidentRun` that is being built: the chunks [first, stop)."""

    first: int
    instance: m.InstanceId
    stop: int

    def packed(self, column: Column) -> m.ResidentRun:
        """column: of the run's instance."""
        chunks = [chunk for chunk in column[self.first : self.stop] if chunk is not None]
        blocks = b"".join([chunk.blocks for chunk in chunks])
        generations = b"".join([chunk.generations for chunk in chunks])
        return m.ResidentRun(self.first, len(chunks), self.instance, blocks, generations)


def _assemble(present: list[bool], columns: dict[m.InstanceId, Column], each: int) -> m.Found:
    """Build the answer, up to the first chunk that is nowhere or that no longer fits the message.
    `each`: the most blocks of a chunk.

    For each chunk, at most `MAX_REPLICAS` instances are named; instances that had the earlier
    chunks come first. Each turn of the loop goes on to the next chunk where instances change."""
    # A sentinel: behind the last chunk every run ends, and every later run begins.
    held = {name: bytes(map(bool, column)) + b"\0\1" for name, column in columns.items()}
    pooled, found, runs, going = bytes(present) + b"\0", 0, list[_Run](), dict[m.InstanceId, _Run]()
    left = FOUND_BYTES // (_RESIDENT_BYTES + each * (m.NUMBER_BYTES + m.GENERATION_BYTES))
    while True:
        here = [name for name in going | held if held[name][found]][: m.MAX_REPLICAS]
        if not (here or pooled[found]) or left < len(here):
            break
        ends = [held[name].find(0, found) for name in here] or [pooled.find(0, found)]
        if len(here) < m.MAX_REPLICAS:
            ends += [held[name].find(1, found) for name in held if name not in here]
        stop = min(*ends, found + left // max(1, len(here)))
        earlier, going = going, {} if here else going
        for name in here:
            run = earlier.get(name)
            if run is None or run.stop < found:
                run = _Run(found, name, stop)
                runs.append(run)
            run.stop = stop
            going[name] = run
        left -= len(here) * (stop - found)
        found = stop
    residents = [run.packed(columns[run.instance]) for run in runs]
    return m.Found(bytes(present[:found]), residents, cut=left < len(here))
