"""The pool: where each chunk is, which slot is written next, and what the next server finds
(docs/adr/0027). Pure: a clock, no socket.

Three rules hold. (1) A slot's generation is odd before a writer hears of the slot, and even only
from the commit on. (2) A slot is given to another writer only after its last writer has said that
it is done, or its process has ended. (3) All of this is in the table before an answer leaves."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count, groupby
from operator import and_

import msgspec

from vcache_backend.metadata_server import resets as namespaces
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.resets import MAX_RESETS, Reset, Resets
from vcache_backend.metadata_server.room import SLOT_BITS, SLOT_MASK, Room, usable
from vcache_backend.metadata_server.slots import SLAB_BITS, SLABS, Slab, SlotRegion, padded
from vcache_backend.protocol import messages as m

_ENOUGH = f"one request reserves at most {m.MAX_SLOTS:,} slots; reserve the others with another one"


class Write(msgspec.Struct, gc=False):
    """Slots that a process writes, by key. client: the connection that may commit them up to the
    deadline. 0: none, they are in quarantine until the process says that it is done, or ends."""

    client: int
    process: ProcessId
    deadline: float
    places: dict[m.ChunkKey, int]


class Directory:
    """The pool's segments and chunks. Called from the server's loop only, or before it runs.

    now: seconds of CLOCK_MONOTONIC, which all servers of this machine share: numbers of writes and
    resets are times in nanoseconds, so those of a later server are larger. A call takes about a
    microsecond for each of its chunks, `clear`, `drop` and `add` for each chunk that is there."""

    def __init__(
        self,
        now: Callable[[], float],
        write_seconds: float,
        counters: Counter[str],
        resets: Resets | None = None,
        keep: Callable[[Resets], None] = lambda resets: None,
        on_reset: Callable[[bytes], None] = lambda namespace: None,
    ) -> None:
        """resets: of earlier servers. keep: called with all resets, to keep them for the next
        server. on_reset: called after a namespace was reset or cleared; b"": all."""
        self._now, self._write_seconds = now, write_seconds
        self.counters, self._keep, self._on_reset = counters, keep, on_reset
        self.room = Room(now, counters)
        self.regions, self.chunks = self.room.regions, self.room.chunks
        self._ids = count()
        self.resets: Resets = resets or {}
        self._last = max((reset.first for reset in self.resets.values()), default=0)
        self.writes: dict[int, Write] = {}
        """By number. Also of earlier servers, which are all in quarantine."""
        self._pending = set[m.ChunkKey]()
        """The chunks that may still be committed."""
        self._done: OrderedDict[tuple[ProcessId, int], None] = OrderedDict()
        """Writes that have ended and of which a table that has yet to come may know."""

    def __len__(self) -> int:
        return len(self.chunks)

    # ---- segments

    def region(self, id_: m.SegmentId) -> SlotRegion | None:
        return next((region for region in self.regions.values() if region.id == id_), None)

    def segments(self) -> list[m.SegmentInfo]:
        return [region.described() for region in self.regions.values()]

    def add(self, region: SlotRegion) -> int:
        """Use a segment. Returns how many chunks of earlier servers it brings. What was being
        written there is in quarantine."""
        number = next(self._ids)
        self.regions[number] = region
        for at, slab in enumerate(region.slabs):
            if not slab.is_read:
                self._take_back(number, region, at << SLAB_BITS, slab)
        return region.chunks

    def drop(self, id_: m.SegmentId) -> int:
        """Forget a segment. Reads under way fail. Returns how many chunks it had."""
        number, region = next(
            (number, region) for number, region in self.regions.items() if region.id == id_
        )
        chunks = region.chunks
        region.give_up()
        for at, write in list(self.writes.items()):
            rest = {key: at for key, at in write.places.items() if at >> SLOT_BITS != number}
            if len(rest) < len(write.places):
                self._quarantine(write)
                write.places = rest
            if not rest:
                del self.writes[at]
        self.room.evict(*[key for key, at in self.chunks.items() if at >> SLOT_BITS == number])
        del self.regions[number]
        region.close()
        return chunks

    # ---- reading

    def places(self, keys: Sequence[m.ChunkKey]) -> list[int | None]:
        """The place of each chunk; None if it is not in the pool."""
        return list(map(self.chunks.get, keys))

    def of_all(self, keys: list[m.ChunkKey], ranks: int) -> list[bool]:
        """For each chunk (key of rank 0) whether the pool has it for all ranks."""
        has = self.chunks.__contains__
        present = list(map(has, keys))
        for rank in range(1, ranks):
            if any(present):
                present = list(map(and_, present, map(has, m.of_rank(keys, rank))))
        return present

    def pin(self, keys: list[m.ChunkKey], seconds: float) -> list[m.SlotRun]:
        """Find the leading chunks, make them recent, the first most of all, and do not evict them
        for some seconds. Whoever reads compares the generations afterwards."""
        found = self.places(keys)
        here = found.index(None) if None in found else len(found)
        places = [place for place in found[:here] if place is not None]
        self.counters["pin_chunks"] += len(keys)
        runs, first = list[m.SlotRun](), 0
        for at, group in groupby(places, SLAB_BITS.__rrshift__):
            if len(runs) == m.MAX_RUNS:
                break
            runs.append(self._run(first, at, [place & SLOT_MASK for place in group]))
            first = runs[-1].stop
        self.counters["pin_hits"] += first
        self.room.use(keys[:first], places[:first], self._now() + seconds if seconds else 0.0)
        return runs

    def touch(self, keys: list[m.ChunkKey]) -> set[m.ChunkKey]:
        """Make chunks recent, the first most of all. Returns those that are in the pool."""
        pairs = zip(keys, self.places(keys), strict=True)
        here = {key: place for key, place in pairs if place is not None}
        self.room.use(list(here), list(here.values()))
        return set(here)

    # ---- writing

    def reserve(self, client: Peer, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """Grant a slot for each key: free ones, on the client's device first, then by eviction. A
        key gets a refusal instead if its chunk is here or being written, or if it comes after the
        first `MAX_SLOTS` new ones."""
        size, epoch = padded(nbytes), self.epoch(keys)
        here = self.touch(keys)  # recent, so that they are not evicted for the others
        new = [key for key in dict.fromkeys(keys) if key not in here and key not in self._pending]
        refusal, reason = self._refusal(client, nbytes)
        most = 0 if refusal is not None else min(len(new), m.MAX_SLOTS)
        taken = self.room.take(client, size, most, len(self._pending))
        number, places = self._next(), dict(zip(new, taken, strict=False))
        granted = dict[m.ChunkKey, m.Location]()
        for key, place in places.items():
            region, slot = self.room.at(place)
            region.grant(slot, key, client.process, number)
            granted[key] = m.Location(region.id, region.offset(slot), nbytes)
        if refusal is None and len(places) < len(new):
            refusal = m.Refusal.FULL
            reason = _ENOUGH if len(places) == m.MAX_SLOTS else _full(nbytes, client.medium)
        slots = list[m.Location | int]()
        for key in keys:
            if key in granted:
                slots.append(granted.pop(key))
            elif key in places or key in self._pending:
                slots.append(int(m.Refusal.BUSY))
            elif key in self.chunks:
                slots.append(int(m.Refusal.EXISTS))
            else:
                slots.append(int(m.Refusal.FULL if refusal is None else refusal))
        if not places:
            return m.Reserved(0, 0.0, slots, reason, epoch)
        self._pending |= places.keys()
        deadline = self._now() + self._write_seconds
        self.writes[number] = Write(client.id, client.process, deadline, places)
        return m.Reserved(number, self._write_seconds, slots, reason, epoch)

    def commit(self, client: Peer, number: int) -> list[m.ChunkKey]:
        """Let readers find what a client has written, the first the most recent. Returns the
        chunks, none if it is too late or there was a reset. The client has finished writing."""
        write = self.writes.get(number)
        if write is None or write.client != client.id or self._now() > write.deadline:
            self.abort(client, number)
            return []
        self._quarantine(write)
        del self.writes[number]
        for key, place in reversed(write.places.items()):
            if key in self.chunks:  # a segment has brought the chunk meanwhile
                self.room.evict(key)
            region, slot = self.room.at(place)
            region.fill(slot, number)
            self.room.put(key, place)
        return list(write.places)

    def abort(self, client: Peer, number: int) -> int:
        """Free slots that a process has finished writing. Returns how many."""
        self._done[client.process, number] = None  # a table that has yet to come may know of it
        if len(self._done) > 4096:
            self._done.popitem(last=False)
        write = self.writes.get(number)
        if write is None or write.process != client.process:
            return 0
        self._quarantine(write)
        return self._free(number)

    def remove(self, keys: Iterable[m.ChunkKey]) -> int:
        """Forget chunks. Reads under way fail. Returns how many."""
        here = self.chunks.keys() & set(keys)
        self.room.evict(*here)
        return len(here)

    # ---- resets

    def epoch(self, keys: Sequence[m.ChunkKey]) -> int:
        """The epoch of the keys' namespace: the number of its last reset, 0 without one."""
        return self._reset(keys[0][: m.NAMESPACE_BYTES]).epoch if self.resets and keys else 0

    def clear(self, namespace: bytes, reset: bool = False) -> int:
        """Forget all chunks of a namespace, or of all with b"", and void what is being written of
        them. Returns how many chunks. reset: also raise the epoch."""
        number, before = self._next(), len(self.chunks)
        if namespace and (namespace in self.resets or len(self.resets) < MAX_RESETS):
            new = Reset(number, number if reset else self._reset(namespace).epoch)
            self._set_resets(self.resets | {namespace: new})
        elif reset or namespace:
            self._set_resets({b"": Reset(number, number)})
        else:
            kept = {b"": self._reset(b"")} | self.resets
            self._set_resets({name: Reset(number, old.epoch) for name, old in kept.items()})
        return before - len(self.chunks)

    # ---- clients and time

    def disconnect(self, client: int) -> None:
        """A connection has ended: what it was writing goes into quarantine."""
        self._quarantine(*(write for write in self.writes.values() if write.client == client))

    def tick(self) -> None:
        """Quarantine what was not committed in time."""
        now = self._now()
        self._quarantine(*(write for write in self.writes.values() if write.deadline < now))

    def quarantined(self) -> list[Write]:
        """The writes in quarantine. The ends of their processes free the slots."""
        return [write for write in self.writes.values() if not write.client]

    def process_gone(self, process: ProcessId) -> None:
        """A process has ended, and writes no more."""
        for number, write in list(self.writes.items()):
            if write.process == process and not write.client:
                self._free(number)

    # ---- inside: chunks

    def _run(self, first: int, at: int, slots: list[int]) -> m.SlotRun:
        region = self.regions[at // SLABS]
        base, generations = slots[0] >> SLAB_BITS << SLAB_BITS, region.generations
        slab, counts = region.slab_of(base), array("Q", [generations[slot] for slot in slots])
        packed = array("I", slots).tobytes(), counts.tobytes()
        return m.SlotRun(first, *packed, region.id, base, slab.offset, slab.slot_bytes)

    def _refusal(self, client: Peer, nbytes: int) -> tuple[m.Refusal | None, str]:
        """Explain why no chunk of this size can get a slot now; (None, "") if a chunk can."""
        written = sum(len(write.places) for write in self.writes.values())
        if written >= 1 << 16:  # a clearing voids all at once
            busy = f"{written:,} slots are being written or in quarantine: see `vcache status`"
            return m.Refusal.FULL, busy
        largest = max((r.nbytes for r in self.regions.values() if usable(r, client)), default=-1)
        if largest < 0:
            media = [region.medium for region in self.regions.values()]
            what = f"no {client.medium} segment is registered"
            if client.medium in media:
                what = f"this worker cannot map any {client.medium} segment of the pool"
            start = "start a worker with pool.segment_bytes > 0 or `vcache segment add`"
            return m.Refusal.NO_SEGMENT, f"{what}; {start}"
        if padded(nbytes) > largest:
            have = f"the largest {client.medium} segment has {largest:,} B"
            advice = f"set pool.segment_bytes >= {nbytes}"
            return m.Refusal.TOO_LARGE, f"a chunk needs {nbytes:,} B but {have}; {advice}"
        return None, ""

    # ---- inside: writes

    def _next(self) -> int:
        """The number of the next write or reset: even, and larger than any before."""
        self._last = max(self._last + 2, int(self._now() * 1e9) & -2)
        return self._last

    def _quarantine(self, *writes: Write) -> None:
        """From now on nobody can commit these."""
        for write in writes:
            if write.client:
                write.client = 0
                self._pending -= write.places.keys()

    def _free(self, number: int) -> int:
        """Free quarantined slots, since their writer has finished. Returns how many."""
        places = self.writes.pop(number).places
        for region, slot in map(self.room.at, places.values()):
            region.ended(slot)
            region.give(slot)
        return len(places)

    # ---- inside: resets

    def _reset(self, namespace: bytes) -> Reset:
        return namespaces.of(self.resets, namespace)

    def _set_resets(self, resets: Resets) -> None:
        changed = [name for name in resets if resets[name] != self._reset(name)]
        self._keep(resets)
        self.resets = resets
        for number, write in self.writes.items():
            if any(number < self._reset(k[: m.NAMESPACE_BYTES]).first for k in write.places):
                self._quarantine(write)
        for name in [b""] if b"" in changed else changed:
            self._on_reset(name)
        old = tuple(changed)
        self.room.evict(*[key for key in self.chunks if key.startswith(old)])

    # ---- inside: after a restart

    def _take_back(self, number: int, region: SlotRegion, first: int, slab: Slab) -> None:
        """Read a slab of an earlier server's table. Its chunks are the least recently used."""
        free = set(range(slab.slots))
        for one in region.occupied(first, slab.slots):
            place = number << SLOT_BITS | one.slot
            if one.committed:
                old = one.number < self._reset(one.key[: m.NAMESPACE_BYTES]).first
                if old or one.key in self.chunks:
                    region.void(one.slot)
                    continue
                self.room.put(one.key, place)
                self.chunks.move_to_end(one.key, last=False)
            elif (one.writer, one.number) in self._done:
                region.ended(one.slot)
                continue
            else:
                write = Write(0, one.writer, math.inf, {})
                self.writes.setdefault(one.number, write).places[one.key] = place
            free.remove(one.slot - first)
        region.unused -= (slab.slots - len(free)) * slab.slot_bytes
        slab.free, slab.is_read = sorted(free, reverse=True), True


def _full(nbytes: int, medium: m.Medium) -> str:
    taken = f"every {medium} segment is full of chunks that are pinned or being written"
    return f"no slot of {nbytes:,} B: {taken}, or of other sizes"
