"""The chunks that instances have published in their KV caches. A pure state machine: no socket, no
fd.

An answer promises nothing, since an instance may reuse a block at any time. A reader checks the
instance's generation table before and after it reads."""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from itertools import groupby, islice, repeat
from operator import itemgetter

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.directory import Backlog, Directory, Steps
from vcache_backend.protocol import messages as m

RETRACT_LOOKS = 4096
"""How many of the newest publications a retraction examines. A retraction drops all older
publications unexamined; a chunk dropped without need is a miss."""
CHUNK_BYTES, BLOCK_BYTES = 320, 136
"""Bytes of server memory for each chunk, besides its block numbers and generations, and for each
block of an instance. The latter pays for `holders` and both tables, which never shrink."""
MAX_COPIES = 2048
"""The most copies of which an instance has yet to be told. Older copies are dropped."""


class PublishedChunk(msgspec.Struct, gc=False, eq=False):
    """A chunk in an instance's KV cache. `key`: of rank 0. `agreed`: a bit for each rank that has
    published the chunk with the same blocks and generations."""

    key: m.ChunkKey
    blocks: bytes
    generations: bytes
    sequence: int
    agreed: int

    def end(self) -> bytes:
        """The number and the generation of the chunk's last block, packed."""
        return self.blocks[-m.NUMBER_BYTES :] + self.generations[-m.GENERATION_BYTES :]


Table = dict[m.ChunkKey, PublishedChunk]
News = tuple[m.InstanceId, m.ChunkKey, bytes]
"""An instance, a chunk that this instance holds, too, and the chunk's `COPY`."""


class InstancePublications:
    """All publications of one instance. A block is in at most one chunk, so the number of blocks
    bounds the number of chunks."""

    def __init__(self, join: m.Join) -> None:
        self.join = join
        self.namespace, self.blocks = join.namespace, join.blocks
        self.ranks, self.each = join.ranks, join.each
        self.whole = False
        """Whether every part of the instance is shown. Look-ups skip the instance until then."""
        self.complete: Table = {}
        self.awaited: Table = {}
        """Chunks that some ranks have published, but not yet all."""
        self.holders: list[PublishedChunk | None] = [None] * self.blocks
        """For each block the last publication that named it, void if in neither table."""
        self._copies = deque[News](maxlen=MAX_COPIES)
        """The oldest first."""
        self.chunk_bytes = CHUNK_BYTES + self.each * (m.NUMBER_BYTES + m.GENERATION_BYTES)
        self.closed = False
        self.counted = 0
        """The bytes of these publications that `ResidentDirectory.nbytes` includes."""
        self._kept = 0
        """The number of chunks in memory: chunks in the tables, and void chunks that `forget` has
        yet to remove."""
        self._all_ranks = (1 << self.ranks) - 1
        self._floor = 0

    def __len__(self) -> int:
        return len(self.complete) + len(self.awaited)

    @property
    def nbytes(self) -> int:
        """About how many bytes of server memory the publications take."""
        kept = self._kept * self.chunk_bytes
        return kept if self.closed and not kept else kept + self.blocks * BLOCK_BYTES

    def publish(self, rank: int, request: m.Publish, most: int) -> int:
        """Take chunks that a rank publishes. Returns how many were taken.

        most: by how many chunks the instance may grow; then a chunk must replace another."""
        each, sequence = self.each, request.sequence
        numbers = self._numbers(rank, request)
        if sequence < self._floor:
            return 0
        taken, limit = 0, len(self) + most
        for at, key in enumerate(m.of_rank(request.keys, 0)):
            part = slice(at * each, (at + 1) * each)
            blocks = request.blocks[part.start * m.NUMBER_BYTES : part.stop * m.NUMBER_BYTES]
            generations = request.generations[
                part.start * m.GENERATION_BYTES : part.stop * m.GENERATION_BYTES
            ]
            chunk = PublishedChunk(key, blocks, generations, sequence, 1 << rank)
            taken += self._take(chunk, numbers[part], full=len(self) >= limit)
        return taken

    def retract(self, sequence: int) -> tuple[Table, Table]:
        """Void publications with a lower sequence. Returns the void chunks, for `forget`."""
        self._floor = max(self._floor, sequence)
        self.complete, complete = _split(self.complete, sequence)
        self.awaited, awaited = _split(self.awaited, sequence)
        return complete, awaited

    def clear(self) -> tuple[Table, Table]:
        """Void all publications. Returns the complete and the awaited chunks, for `forget`."""
        tables = self.complete, self.awaited
        self.complete = {}
        self.awaited = {}
        return tables

    def forget(self, tables: tuple[Table, ...]) -> Steps:
        """Remove void publications from memory. A publication with more blocks takes more steps."""
        for table in tables:
            while table:
                self._vacate(table.popitem()[1])
                self._kept -= 1
                yield from repeat(None, 1 + self.each // 8)

    def note_copies(
        self, instance: m.InstanceId, theirs: Table, keys: Iterable[m.ChunkKey]
    ) -> None:
        """Note that `instance` holds these chunks, too. theirs: its complete chunks."""
        # Packed here, and not when they are told: a scheduler waits for that.
        for key in keys:
            own = self.complete[key]
            packed = own.end() + own.blocks[: m.NUMBER_BYTES] + theirs[key].end()
            self._copies.append((instance, key, packed))

    def take_copies(self, most: int) -> list[News]:
        """Take the oldest notes, at most `most`."""
        return [self._copies.popleft() for _ in range(min(most, len(self._copies)))]

    # ---- inside

    def _numbers(self, rank: int, request: m.Publish) -> tuple[int, ...]:
        """Unpack a request's block numbers. Refuse a request that does not fit this instance."""
        due, namespace = len(request.keys) * self.each, self.namespace
        sizes = len(request.blocks), len(request.generations)
        if sizes != (due * m.NUMBER_BYTES, due * m.GENERATION_BYTES):
            raise Refused(f"publish: {sizes} B of numbers and generations for {due:,} blocks")
        suffix = rank.to_bytes(m.RANK_BYTES, "big")
        if not all(key.startswith(namespace) and key.endswith(suffix) for key in request.keys):
            raise Refused(f"publish: keys not of namespace {namespace.hex()}, rank {rank}")
        if rank >= self.ranks:
            raise Refused(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        numbers = struct.unpack(f"<{due}I", request.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refused(f"publish: block {max(numbers):,} of an instance with {self.blocks:,}")
        return numbers

    def _take(self, new: PublishedChunk, numbers: tuple[int, ...], full: bool) -> bool:
        """Take one chunk. Returns False, and takes nothing, if the chunk names a block twice, or if
        a newer publication has its key or one of its blocks.

        full: take the chunk only if it replaces another."""
        complete, awaited, holders = self.complete, self.awaited, self.holders
        key = new.key
        old = complete.get(key) or awaited.get(key)
        if old is not None and old.blocks == new.blocks and old.generations == new.generations:
            return self._agree(old, new)
        rivals = {
            holder
            for block in numbers
            if (holder := holders[block]) is not None and self._has(holder)
        }
        if old is not None:
            rivals.add(old)
        if (
            any(rival.sequence > new.sequence for rival in rivals)
            or len(set(numbers)) < len(numbers)
            or (full and not rivals)
        ):
            return False
        self._kept += 1 - len(rivals)
        for rival in rivals:
            (complete if complete.get(rival.key) is rival else awaited).pop(rival.key)
            self._vacate(rival)
        for block in numbers:
            holders[block] = new
        (complete if self.ranks == 1 else awaited)[key] = new
        return True

    def _agree(self, old: PublishedChunk, new: PublishedChunk) -> bool:
        """A rank publishes the same chunk as `old`. False if `old` is newer and awaited."""
        if self.complete.get(old.key) is old:
            old.sequence = max(old.sequence, new.sequence)
            return True
        if new.sequence < old.sequence:
            return False
        old.agreed = new.agreed | (old.agreed if new.sequence == old.sequence else 0)
        old.sequence = new.sequence
        if old.agreed == self._all_ranks:
            self.complete[old.key] = self.awaited.pop(old.key)
        return True

    def _has(self, chunk: PublishedChunk) -> bool:
        return self.complete.get(chunk.key) is chunk or self.awaited.get(chunk.key) is chunk

    def _vacate(self, chunk: PublishedChunk) -> None:
        holders = self.holders
        for block in struct.unpack(f"<{self.each}I", chunk.blocks):
            if holders[block] is chunk:
                holders[block] = None


def _split(table: Table, sequence: int) -> tuple[Table, Table]:
    """Split a table into chunks whose sequence is at least `sequence`, and older chunks. The given
    table becomes one of the two results."""
    newest = list(islice(reversed(table.values()), RETRACT_LOOKS))
    kept = {chunk.key: chunk for chunk in reversed(newest) if chunk.sequence >= sequence}
    if len(table) > 2 * RETRACT_LOOKS:
        for key in kept:
            del table[key]
        return kept, table
    void = {key: chunk for key, chunk in table.items() if key not in kept}
    for key in void:
        del table[key]
    return table, void


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

    def find(self, request: m.Find, pooled: Directory) -> m.Found:
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
