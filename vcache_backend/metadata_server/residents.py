"""Which chunks lie in which instances' own KV caches, as those have published them. A pure state machine: no socket, no fd.

Nothing here is a promise: an instance uses a block again whenever it likes. Its generation table tells a reader, before and after.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from itertools import islice, repeat

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.backlog import Backlog, Steps
from vcache_backend.metadata_server.chunks import Chunks
from vcache_backend.metadata_server.messages import of_rank
from vcache_backend.metadata_server.recency import Recency
from vcache_backend.metadata_server.refuse import Refuse

MAX_BLOCKS_IN_ALL = 2 * m.MAX_BLOCKS
"""Of all instances together."""
RETRACT_LOOKS = 4096
"""So many of the newest publications are looked through for such as a retraction leaves; what is behind them is not found, as if it was
never published."""
MAX_CELLS = 16_384
"""Keys times instances that one look-up looks at; the keys after these are left for the next one."""
FOUND_BYTES = m.MAX_MESSAGE_BYTES - 8192
"""For the residents of one answer; the rest is for what comes with them."""
_RESIDENT_BYTES = 16
"""At most, of a resident in a message, beside its blocks and generations."""
_FIRST_RANK = bytes(m.RANK_BYTES)


class PublishedChunk(msgspec.Struct, gc=False, eq=False):
    """One chunk in one instance's KV cache. `key`: of rank 0. `agreed`: a bit for each rank that has published the same."""

    key: m.ChunkKey
    blocks: bytes
    generations: bytes
    sequence: int
    agreed: int


Column = list[PublishedChunk | None]
"""What one instance has of each key of a look-up."""


class Residence:
    """What one instance has published: each block holds at most one chunk, so all tables are bounded by its blocks."""

    def __init__(self, namespace: bytes, blocks: int, ranks: int, each: int) -> None:
        self.shape = namespace, blocks, ranks, each
        self.namespace, self.blocks, self.ranks, self.each = self.shape
        self.whole = False
        """Whether everything of the instance is shown: else nothing of it is found."""
        self.found: dict[m.ChunkKey, PublishedChunk] = {}
        self.awaited: dict[m.ChunkKey, PublishedChunk] = {}
        """Published by some of the ranks only."""
        self.holders: list[PublishedChunk | None] = [None] * blocks
        """Which publication a block belongs to. One that is in neither table any more means nothing."""
        self.recency = Recency()
        self._all_ranks = (1 << ranks) - 1
        self._floor = 0

    def __len__(self) -> int:
        return len(self.found) + len(self.awaited)

    def publish(self, rank: int, request: m.Publish, most: int) -> int:
        """How many of the chunks are taken, `most` new ones at most."""
        each, sequence = self.each, request.sequence
        numbers = self._numbers(rank, request)
        if sequence < self._floor:
            return 0
        taken, limit = 0, len(self) + most
        for at, key in enumerate(request.keys):
            if len(self) >= limit:
                break
            part = slice(at * each, (at + 1) * each)
            blocks = request.blocks[part.start * m.NUMBER_BYTES : part.stop * m.NUMBER_BYTES]
            generations = request.generations[part.start * m.GENERATION_BYTES : part.stop * m.GENERATION_BYTES]
            first = m.ChunkKey(key[: -m.RANK_BYTES] + _FIRST_RANK) if rank else key
            taken += self._take(PublishedChunk(first, blocks, generations, sequence, 1 << rank), numbers[part])
        return taken

    def retract(self, sequence: int) -> tuple[int, Steps]:
        """Publications with a lower sequence are void: how many there were, and what clears them away."""
        self._floor = max(self._floor, sequence)
        tables = self.found, self.awaited
        self.found, self.awaited = {}, {}
        kept = 0
        for old, new in zip(tables, (self.found, self.awaited), strict=True):
            newest = list(islice(reversed(old.values()), RETRACT_LOOKS))
            new.update((one.key, one) for one in reversed(newest) if one.sequence >= sequence)
            kept += len(new)
        return sum(map(len, tables)) - kept, self._forget(tables)

    def clear(self) -> tuple[int, Steps]:
        """Nothing is found any more: how many chunks were, and what clears them away."""
        tables = self.found, self.awaited
        self.found, self.awaited = {}, {}
        return len(tables[0]), self._forget(tables)

    # ---- inside

    def _numbers(self, rank: int, request: m.Publish) -> tuple[int, ...]:
        """The blocks' numbers, if everything has the length it should have and they are blocks of this instance."""
        due, namespace = len(request.keys) * self.each, self.namespace
        if (len(request.blocks), len(request.generations)) != (due * m.NUMBER_BYTES, due * m.GENERATION_BYTES):
            what = f"{len(request.keys)} keys of {self.each} blocks, but {len(request.blocks):,} B of numbers"
            size = f"{m.NUMBER_BYTES} and {m.GENERATION_BYTES} B a block"
            raise Refuse(f"publish: {what} and {len(request.generations):,} B of generations; {size} are due")
        suffix = rank.to_bytes(m.RANK_BYTES, "big")
        if not all(key.startswith(namespace) and key.endswith(suffix) for key in request.keys):
            raise Refuse(f"publish: keys of other namespaces or ranks than {namespace.hex()} and {rank}")
        if rank >= self.ranks:
            raise Refuse(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        numbers = struct.unpack(f"<{due}I", request.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refuse(f"publish: block {max(numbers):,} of an instance that has {self.blocks:,}")
        return numbers

    def _take(self, new: PublishedChunk, numbers: tuple[int, ...]) -> bool:
        """One chunk, unless a newer publication has its key or one of its blocks, or a block is in it twice."""
        found, awaited, holders = self.found, self.awaited, self.holders
        key = new.key
        old = found.get(key) or awaited.get(key)
        if old is not None and old.blocks == new.blocks and old.generations == new.generations:
            return self._agree(old, new)
        rivals = {holder for block in numbers if (holder := holders[block]) is not None and self._has(holder)}
        if old is not None:
            rivals.add(old)
        if any(rival.sequence > new.sequence for rival in rivals) or len(set(numbers)) < len(numbers):
            return False
        for rival in rivals:
            (found if found.get(rival.key) is rival else awaited).pop(rival.key)
            self._vacate(rival)
        for block in numbers:
            holders[block] = new
        (found if self.ranks == 1 else awaited)[key] = new
        return True

    def _agree(self, old: PublishedChunk, new: PublishedChunk) -> bool:
        """A rank publishes what the instance has published already: by itself before, or by another rank."""
        if self.found.get(old.key) is old:
            old.sequence = max(old.sequence, new.sequence)
            return True
        if new.sequence < old.sequence:
            return False
        old.agreed = new.agreed | (old.agreed if new.sequence == old.sequence else 0)
        old.sequence = new.sequence
        if old.agreed == self._all_ranks:
            self.found[old.key] = self.awaited.pop(old.key)
        return True

    def _has(self, one: PublishedChunk) -> bool:
        return self.found.get(one.key) is one or self.awaited.get(one.key) is one

    def _vacate(self, one: PublishedChunk) -> None:
        """No block belongs to this one any more."""
        holders = self.holders
        for block in struct.unpack(f"<{self.each}I", one.blocks):
            if holders[block] is one:
                holders[block] = None

    def _forget(self, tables: tuple[dict[m.ChunkKey, PublishedChunk], ...]) -> Steps:
        """Publications that are found no more go, but for those that are kept; more steps each the more blocks they have."""
        for table in tables:
            while table:
                _, one = table.popitem()
                if not self._has(one):
                    self._vacate(one)
                yield from repeat(None, 1 + self.each // 8)


class Residents:
    """What all instances have published. `max_chunks`: in all together."""

    def __init__(self, backlog: Backlog, counters: Counter[str], max_chunks: int) -> None:
        self._backlog, self._counters, self._max_chunks = backlog, counters, max_chunks
        self._of: dict[m.InstanceId, Residence] = {}

    def count(self, instance: m.InstanceId) -> int:
        """Chunks that are found in an instance, once all of it is shown."""
        residence = self._of.get(instance)
        return 0 if residence is None else len(residence.found)

    def holders(self, instance: m.InstanceId) -> list[PublishedChunk | None]:
        """What each of its blocks holds."""
        return self._of[instance].holders

    def blocks_left(self, instance: m.InstanceId) -> int:
        """How many blocks this instance may have beside the others'."""
        return MAX_BLOCKS_IN_ALL - sum(residence.blocks for id_, residence in self._of.items() if id_ != instance)

    def open(self, instance: m.InstanceId, namespace: bytes, blocks: int, ranks: int, each: int) -> None:
        """An instance publishes from now on. If it has published before, it keeps that, unless it has changed."""
        known = self._of.get(instance)
        if known is None or known.shape != (namespace, blocks, ranks, each):
            self.close(instance)
            self._of[instance] = Residence(namespace, blocks, ranks, each)

    def show(self, instance: m.InstanceId, whole: bool) -> None:
        """Whether its chunks are found."""
        if (residence := self._of.get(instance)) is not None:
            residence.whole = whole

    def empty(self, instance: m.InstanceId) -> None:
        """Nothing that it has published is right any more."""
        if (residence := self._of.get(instance)) is not None:
            self._backlog.later(residence.clear()[1])

    def close(self, instance: m.InstanceId) -> None:
        """The instance is gone."""
        self.empty(instance)
        self._of.pop(instance, None)

    def publish(self, rank: int, request: m.Publish) -> int:
        """How many chunks are taken; 0 if the instance has not joined. Refuse: lengths or numbers that cannot be."""
        residence = self._of.get(request.instance)
        if residence is None:
            return 0
        room = self._max_chunks - sum(map(len, self._of.values()))
        taken = residence.publish(rank, request, max(0, room))
        self._counters["published"] += taken
        return taken

    def retract(self, instance: m.InstanceId, sequence: int) -> int:
        """What an instance publishes with a lower sequence is void; how many chunks it had published so."""
        residence = self._of.get(instance)
        if residence is None:
            return 0
        dropped, rest = residence.retract(sequence)
        self._backlog.later(rest)
        return dropped

    def clear(self, namespace: bytes) -> int:
        """Forget what is resident of a namespace, or all with b""; how many chunks."""
        dropped = 0
        for residence in self._of.values():
            if not namespace or residence.namespace == namespace:
                chunks, rest = residence.clear()
                dropped += chunks
                self._backlog.later(rest)
        return dropped

    # ---- what others read

    def hint(self, instance: m.InstanceId, keys: list[m.ChunkKey]) -> int:
        """The prefix of these chunks is read in an instance; how many of them are found there."""
        residence = self._of.get(instance)
        noted = residence.recency.note(keys, residence.found) if residence is not None else 0
        self._counters["hints"] += noted
        return noted

    def heard(self, instance: m.InstanceId, epoch: int) -> m.Heard:
        """What its scheduler is to hear: of the hints as many as the message holds."""
        residence = self._of[instance]
        keys = residence.recency.take(FOUND_BYTES // (residence.each * (m.NUMBER_BYTES + m.GENERATION_BYTES)))
        read = [one for key in keys if (one := residence.found.get(key)) is not None]
        return m.Heard(epoch, b"".join(one.blocks for one in read), b"".join(one.generations for one in read))

    # ---- look-up

    def find(self, request: m.Find, pooled: Chunks) -> m.Found:
        """Which leading chunks are pooled for all ranks, or resident in another instance than the asker."""
        others = self._others(request)
        keys = request.keys[: MAX_CELLS // max(1, len(others))]
        columns = {instance: column for instance, found in others if (column := _column(found, keys))}
        if columns:
            each = max(self._of[instance].each for instance in columns)
            found = _assemble(_present(keys, request.ranks, pooled), columns, each)
        else:
            chunks = pooled.leading_of_all(keys, request.ranks)
            found = m.Found(b"\1" * chunks, [], [[]] * chunks)
        return msgspec.structs.replace(found, cut=True) if len(found.pooled) == len(keys) < len(request.keys) else found

    def _others(self, request: m.Find) -> list[tuple[m.InstanceId, dict[m.ChunkKey, PublishedChunk]]]:
        """What is found in each instance that may have some of the keys, in random order."""
        if not self._of or not request.keys:
            return []
        namespace, ranks, asker = request.keys[0][: m.NAMESPACE_BYTES], request.ranks, request.instance
        others = [
            (instance, residence.found)
            for instance, residence in self._of.items()
            if residence.found and residence.whole and residence.namespace == namespace
            if residence.ranks == ranks and instance != asker
        ]
        random.shuffle(others)
        return others


def _column(found: dict[m.ChunkKey, PublishedChunk], keys: list[m.ChunkKey]) -> Column:
    """What one instance has of each key; empty if it has none of them."""
    column = list(map(found.get, keys))
    return column if column.count(None) < len(column) else []


def _present(keys: list[m.ChunkKey], ranks: int, pooled: Chunks) -> list[bool]:
    """For each chunk whether it is pooled for all ranks."""
    there = list(map(pooled.among(keys).__contains__, keys))
    for rank in range(1, ranks):
        if not any(there):
            break
        its = of_rank(keys, rank)
        there = [a and b for a, b in zip(there, map(pooled.among(its).__contains__, its), strict=True)]
    return there


def _assemble(there: list[bool], columns: dict[m.InstanceId, Column], each: int) -> m.Found:
    """The answer, as far as chunks are somewhere and the message reaches. `each`: blocks of a chunk, at most."""
    residents: list[list[m.Resident]] = []
    left, last = FOUND_BYTES // (_RESIDENT_BYTES + each * (m.NUMBER_BYTES + m.GENERATION_BYTES)), 0
    for pooled, row in zip(there, zip(*columns.values(), strict=True), strict=True):
        here = _places(row, last)
        if not here and not pooled:
            break
        left -= len(here)
        if left < 0:
            return m.Found(bytes(there[: len(residents)]), list(columns), residents, cut=True)
        if here:
            last = here[0].instance
        residents.append(here)
    return m.Found(bytes(there[: len(residents)]), list(columns), residents)


def _places(row: tuple[PublishedChunk | None, ...], last: int) -> list[m.Resident]:
    """Where one chunk is resident, at most `MAX_REPLICAS` places: `last` first, if it is among them."""
    one = row[last]
    here = [m.Resident(last, one.blocks, one.generations)] if one is not None else []
    for at, one in enumerate(row) if len(row) > 1 else ():
        if one is not None and at != last:
            here.append(m.Resident(at, one.blocks, one.generations))
            if len(here) == m.MAX_REPLICAS:
                break
    return here
