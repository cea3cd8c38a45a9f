"""The pool as slots with generations: where each chunk is, which slot is written next, and what the
next server finds. A prototype beside `pool.directory`; see ADR 27. Pure: a clock, no socket.

Three rules hold. (1) A slot's generation is odd before a writer hears of the slot, and even only
from the commit on. (2) A slot is given to another writer only after its last writer has said that
it is done, or its process has ended. (3) All of this is in the table before an answer leaves."""

from __future__ import annotations

import mmap
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, groupby, islice, repeat
from typing import NamedTuple

import msgspec

from vcache_backend.metadata_server.pool.allocator import padded
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.metadata_server.slots_table import SlabPlace, SlotsTable
from vcache_backend.protocol.messages import (
    MAX_SLOTS,
    NAMESPACE_BYTES,
    ChunkKey,
    Refusal,
    SegmentId,
)
from vcache_backend.protocol.slot_layout import MAX_RESETS, SLAB_SLOTS, SLABS, SLOTS

SEARCH = 64
"""How many of the least recently used chunks are looked at for one to evict."""
SLABS_WANTED = 32
"""A slab has this part of its segment, or one slot."""
_SLOT_BITS = SLOTS.bit_length() - 1
_SLAB_BITS = SLAB_SLOTS.bit_length() - 1
_SLOT_MASK = SLOTS - 1


class SlotRun(NamedTuple):
    """Consecutive chunks of an answer that lie in one slab. Slots are counted from the table's
    start, `base` is the slab's first, and the slot `base + i` begins at byte `offset + i *
    slot_bytes` of the segment. slots (32 bits each) and generations are packed."""

    first: int
    segment: SegmentId
    base: int
    offset: int
    slot_bytes: int
    slots: bytes
    generations: bytes


class SlotGrant(NamedTuple):
    """A slot to write, in bytes of the segment."""

    segment: SegmentId
    offset: int


class SlotsGranted(NamedTuple):
    """number: of the fill, which `commit` and `abort` name; 0 if no slot was granted."""

    number: int
    slots: list[SlotGrant | Refusal]


class _Slab:
    """Slots of one size. free: their numbers within the slab."""

    def __init__(self, place: SlabPlace) -> None:
        self.place = place
        self.free = list(range(place.slots - 1, -1, -1))


class SlotRegion:
    """A segment with its table. `unused`: bytes of free slots and outside of all slabs."""

    def __init__(self, id_: SegmentId, device: str, nbytes: int, table: SlotsTable) -> None:
        self.id, self.device, self.nbytes, self.table = id_, device, nbytes, table
        self.slabs = list[_Slab]()
        self.unused = nbytes
        self.pins = memoryview(mmap.mmap(-1, 8 * SLOTS)).cast("d")
        """Until when a slot's chunk is not evicted."""

    @property
    def uncut(self) -> int:
        """The first byte behind all slabs."""
        return self.slabs[-1].place.offset + self.slabs[-1].place.nbytes if self.slabs else 0

    def cut(self, size: int) -> _Slab | None:
        """A new slab with slots of `size`; None if there is no room for one."""
        left = self.nbytes - self.uncut
        slots = min(max(self.nbytes // SLABS_WANTED // size, 1), left // size, SLAB_SLOTS)
        if not slots or len(self.slabs) == SLABS:
            return None
        place = SlabPlace(self.uncut, size, slots * size)
        self.table.cut(len(self.slabs), place)
        self.slabs.append(_Slab(place))
        return self.slabs[-1]

    def offset(self, slot: int) -> int:
        place = self.slabs[slot >> _SLAB_BITS].place
        return place.offset + (slot & SLAB_SLOTS - 1) * place.slot_bytes


class _Write(msgspec.Struct, gc=False):
    """Slots that a client's process writes, by key, and may commit."""

    client: int
    process: ProcessId
    deadline: float
    places: dict[ChunkKey, int]


class SlotDirectory:
    """The pool's segments of one medium. Called from the server's loop only.

    now: seconds of CLOCK_MONOTONIC, which all servers of this machine share: the numbers of fills
    are times in nanoseconds, so those of a later server are larger. A place is a region's number
    and a slot of its table, as one integer."""

    def __init__(self, now: Callable[[], float], write_seconds: float) -> None:
        self._now, self._write_seconds = now, write_seconds
        self.regions: dict[int, SlotRegion] = {}
        self._ids = count()
        self._last = 0
        self._live: OrderedDict[ChunkKey, int] = OrderedDict()
        """The place of each committed chunk, the least recently used first."""
        self._writes: dict[int, _Write] = {}
        """In order of deadlines: all last equally long."""
        self._pending: dict[ChunkKey, int] = {}
        self._void: dict[ProcessId, dict[int, list[int]]] = {}
        """Slots in quarantine, by writer and number."""
        self.resets: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._live)

    # ---- segments

    def add(self, region: SlotRegion) -> int:
        """Use a segment. Returns how many chunks of earlier servers it brings."""
        number = next(self._ids)
        theirs = region.table.resets()
        names = {*theirs, *self.resets}
        merged = {name: max(self._first(name), _first(theirs, name)) for name in names}
        self.regions[number] = region
        self._set_resets(merged)
        region.slabs = list(map(_Slab, region.table.slabs()))
        chunks = sorted(
            chain.from_iterable(map(self._read, repeat(number), range(len(region.slabs))))
        )
        region.unused -= sum(
            (slab.place.slots - len(slab.free)) * slab.place.slot_bytes for slab in region.slabs
        )
        for fill, key, place in reversed(chunks):
            old = fill < self._first(key[:NAMESPACE_BYTES])
            if old or key in self._live or key in self._pending:
                self._void_slot(place)
            else:  # as the least recently used one
                self._live[key] = place
                self._live.move_to_end(key, last=False)
        return len(chunks)

    def drop(self, id_: SegmentId) -> None:
        """Forget a segment. Reads under way fail."""
        number = next(n for n, region in self.regions.items() if region.id == id_)
        for fill, write in list(self._writes.items()):
            if any(place >> _SLOT_BITS == number for place in write.places.values()):
                self._quarantine(fill)
        for process, void in list(self._void.items()):
            kept = {
                fill: [p for p in places if p >> _SLOT_BITS != number]
                for fill, places in void.items()
            }
            self._void[process] = {fill: places for fill, places in kept.items() if places}
            if not self._void[process]:
                del self._void[process]
        for key in [key for key, place in self._live.items() if place >> _SLOT_BITS == number]:
            del self._live[key]
        region = self.regions.pop(number)
        region.table.give_up()
        region.table.close()

    # ---- reading

    def find(self, keys: list[ChunkKey], pin: float) -> list[SlotRun]:
        """The leading chunks that are here. They become recent, the first most of all, and are not
        evicted for `pin` seconds. Whoever reads compares the generations afterwards."""
        live, places = self._live, list[int]()
        for place in map(live.get, keys):
            if place is None:
                break
            places.append(place)
        oldest = self._first(keys[0][:NAMESPACE_BYTES]) if keys and self.resets else 0
        until, runs, found = self._now() + pin, list[SlotRun](), 0
        for slab_number, group in groupby(places, _SLAB_BITS.__rrshift__):
            region = self.regions[slab_number >> _SLOT_BITS - _SLAB_BITS]
            pins, slots = region.pins, [place & _SLOT_MASK for place in group]
            numbers = list(map(region.table.generations.__getitem__, slots))
            whole = len(slots)
            if oldest and min(numbers) < oldest:  # from here on of before a reset
                whole = next(i for i, number in enumerate(numbers) if number < oldest)
            for slot in slots[:whole]:
                pins[slot] = until
            if whole:
                runs.append(_run(found, region, slots[:whole], numbers[:whole]))
            found += whole
            if whole < len(slots):
                break
        for key in reversed(keys[:found]):
            live.move_to_end(key)
        return runs

    def touch(self, keys: list[ChunkKey]) -> None:
        """Make chunks recent, the first most of all."""
        for key in reversed(keys):
            if key in self._live:
                self._live.move_to_end(key)

    def contains(self, key: ChunkKey) -> bool:
        place = self._live.get(key)
        return place is not None and self._generation(place) >= self._first(key[:NAMESPACE_BYTES])

    # ---- writing

    def reserve(self, client: Peer, keys: list[ChunkKey], nbytes: int) -> SlotsGranted:
        """Grant a slot for each key: in free slots, on the client's device first, then by eviction.
        A key gets a refusal instead if its chunk is here or being written."""
        size = padded(nbytes)
        self.touch(keys)  # they are in use: do not evict them for the others
        wanted = [key for key in dict.fromkeys(keys) if self._may_store(key)][:MAX_SLOTS]
        refusal = self._refusal(size)
        slots = self._slots(size, client.device) if refusal is None else iter(())
        number, granted = self._next(), dict[ChunkKey, int]()
        for key, place in zip(wanted, slots, strict=False):
            region, slot = self._at(place)
            region.table.grant(slot, key, client.process, number)
            granted[key] = place
        if granted:
            deadline = self._now() + self._write_seconds
            self._writes[number] = _Write(client.id, client.process, deadline, granted)
            self._pending.update(dict.fromkeys(granted, number))
        answers, given = list[SlotGrant | Refusal](), dict(granted)
        for key in keys:
            place_or_none = given.pop(key, None)
            if place_or_none is not None:
                region, slot = self._at(place_or_none)
                answers.append(SlotGrant(region.id, region.offset(slot)))
            elif key in self._pending:
                answers.append(Refusal.BUSY)
            else:
                full = Refusal.FULL if refusal is None else refusal
                answers.append(Refusal.EXISTS if key in self._live else full)
        return SlotsGranted(number if granted else 0, answers)

    def commit(self, client: Peer, number: int) -> int:
        """Let readers find what a client has written. Returns how many chunks: none if it comes too
        late, or after a reset. In any case the client has finished writing."""
        write = self._writes.get(number)
        if write is None or write.client != client.id or self._now() > write.deadline:
            self._free(client.process, number)
            return 0
        self._shut(number)
        for key, place in reversed(write.places.items()):
            if key in self._live:  # a segment has brought the chunk meanwhile
                self._evict(key)
            region, slot = self._at(place)
            region.table.fill(slot, number)
            self._live[key] = place
        return len(write.places)

    def abort(self, client: Peer, number: int) -> int:
        """Free slots that a process has finished writing. Returns how many."""
        return self._free(client.process, number)

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Forget chunks. Reads under way fail. Returns how many."""
        here = [key for key in keys if key in self._live]
        for key in here:
            self._evict(key)
        return len(here)

    def reset(self, namespace: bytes) -> int:
        """From now on nothing granted before is found, of a namespace, or of all with b"". Returns
        the namespace's epoch. Takes no time for each chunk: the slots are used again in turn."""
        number = self._next()
        if namespace and (namespace in self.resets or len(self.resets) < MAX_RESETS):
            self._set_resets(self.resets | {namespace: number})
        else:
            self._set_resets({b"": number})
        return number

    def hear(self, namespace: bytes, epoch: int) -> None:
        """A client knows of this reset, perhaps by an earlier server whose tables did not all
        come back."""
        if epoch > self._first(namespace):
            others = {} if namespace else dict.fromkeys(self.resets, epoch)
            self._set_resets(self.resets | {namespace: epoch} | others)

    # ---- clients and time

    def disconnect(self, client: int) -> None:
        """A connection has ended: what it was writing goes into quarantine."""
        for number in [n for n, write in self._writes.items() if write.client == client]:
            self._quarantine(number)

    def tick(self) -> None:
        """Quarantine what was not committed in time."""
        now = self._now()
        for number in [n for n, write in self._writes.items() if write.deadline < now]:
            self._quarantine(number)

    def writers(self) -> set[ProcessId]:
        """The processes whose end frees slots. Also of earlier servers."""
        return set(self._void)

    def process_gone(self, process: ProcessId) -> None:
        """A process has ended, and writes no more."""
        for number in list(self._void.get(process, ())):
            self._free(process, number)

    # ---- inside

    def _free(self, process: ProcessId, number: int) -> int:
        """Free the slots that a process has finished writing. Returns how many."""
        write = self._writes.get(number)
        if write is not None and write.process == process:
            self._quarantine(number)
        void = self._void.get(process, {})
        places = void.pop(number, [])
        if not void:
            self._void.pop(process, None)
        for place in places:
            region, slot = self._at(place)
            region.table.free(slot)
            self._give(place)
        return len(places)

    def _next(self) -> int:
        """The number of the next fill or reset: even, and larger than any before."""
        self._last = max(self._last + 2, int(self._now() * 1e9) & -2)
        return self._last

    def _at(self, place: int) -> tuple[SlotRegion, int]:
        return self.regions[place >> _SLOT_BITS], place & _SLOT_MASK

    def _generation(self, place: int) -> int:
        region, slot = self._at(place)
        return region.table.generations[slot]

    def _first(self, namespace: bytes) -> int:
        return _first(self.resets, namespace)

    def _set_resets(self, resets: dict[bytes, int]) -> None:
        while len(resets) > MAX_RESETS:
            resets = {b"": max(resets.values())}
        self._last = max([self._last, *resets.values()])
        self.resets = resets
        for region in self.regions.values():
            if region.table.resets() != resets:
                region.table.write_resets(resets)
        for number, write in list(self._writes.items()):
            if any(number < self._first(key[:NAMESPACE_BYTES]) for key in write.places):
                self._quarantine(number)

    def _may_store(self, key: ChunkKey) -> bool:
        if key in self._live and not self.contains(key):
            self._evict(key)  # of before a reset
        return key not in self._live and key not in self._pending

    def _refusal(self, size: int) -> Refusal | None:
        if not self.regions:
            return Refusal.NO_SEGMENT
        largest = max(region.nbytes for region in self.regions.values())
        return Refusal.TOO_LARGE if size > largest else None

    def _slots(self, size: int, device: str) -> Iterator[int]:
        """Places for chunks of this size, which the caller grants at once."""
        rank = {
            n: (r.device != device, -r.unused) for n, r in self.regions.items() if r.unused >= size
        }
        for number in sorted(rank, key=rank.__getitem__):
            region = self.regions[number]
            for slab_number in count():
                if slab_number == len(region.slabs) and region.cut(size) is None:
                    break
                yield from self._of_slab(number, slab_number, size)
        while (place := self._victim(size)) is not None:
            yield place

    def _of_slab(self, number: int, slab_number: int, size: int) -> Iterator[int]:
        region = self.regions[number]
        slab = region.slabs[slab_number]
        while slab.place.slot_bytes == size and slab.free:
            slot = slab_number << _SLAB_BITS | slab.free.pop()
            region.unused -= size
            yield number << _SLOT_BITS | slot

    def _victim(self, size: int) -> int | None:
        """The place of an evicted chunk: the least recently used one of this size. If the least
        recently used chunks are all of other sizes, one of their slabs changes its size."""
        now, others = self._now(), dict[int, None]()
        for key, place in islice(self._live.items(), SEARCH):
            region, slot = self._at(place)
            if region.slabs[slot >> _SLAB_BITS].place.slot_bytes != size:
                others[place >> _SLAB_BITS] = None
            elif region.pins[slot] <= now:
                self._evict(key)
                slab = region.slabs[slot >> _SLAB_BITS]
                slab.free.pop()
                region.unused -= size
                return place
        for at in others:
            if self._resized(at, size, now):
                number, slab_number = divmod(at, SLABS)
                return next(self._of_slab(number, slab_number, size))
        return None

    def _resized(self, at: int, size: int, now: float) -> bool:
        """Evict all chunks of a slab, unless one is pinned or being written, and change its slots'
        size."""
        number, slab_number = divmod(at, SLABS)
        region = self.regions[number]
        slab, first = region.slabs[slab_number], slab_number << _SLAB_BITS
        if slab.place.nbytes < size:
            return False
        used = list(region.table.occupied(first, slab.place.slots))
        if any(not one.committed or region.pins[one.slot] > now for one in used):
            return False
        for one in used:
            self._evict(one.key)
        region.table.resize(slab_number, size)
        region.slabs[slab_number] = _Slab(slab.place._replace(slot_bytes=size))
        return True

    def _evict(self, key: ChunkKey) -> None:
        self._void_slot(self._live.pop(key))

    def _void_slot(self, place: int) -> None:
        region, slot = self._at(place)
        region.table.void(slot)
        self._give(place)

    def _give(self, place: int) -> None:
        """Make a slot free here; its table says so already."""
        region, slot = self._at(place)
        slab = region.slabs[slot >> _SLAB_BITS]
        slab.free.append(slot & SLAB_SLOTS - 1)
        region.unused += slab.place.slot_bytes

    def _shut(self, number: int) -> _Write:
        write = self._writes.pop(number)
        for key in write.places:
            del self._pending[key]
        return write

    def _quarantine(self, number: int) -> None:
        write = self._shut(number)
        self._void.setdefault(write.process, {})[number] = list(write.places.values())

    # ---- after a restart

    def _read(self, number: int, slab_number: int) -> Iterator[tuple[int, ChunkKey, int]]:
        """The chunks of a slab, each with its number and place; what is being written goes into
        quarantine."""
        region = self.regions[number]
        slab, first = region.slabs[slab_number], slab_number << _SLAB_BITS
        taken = set[int]()
        for one in region.table.occupied(first, slab.place.slots):
            place = number << _SLOT_BITS | one.slot
            taken.add(one.slot - first)
            if one.committed:
                yield one.number, one.key, place
            else:
                self._void.setdefault(one.writer, {}).setdefault(one.number, []).append(place)
        slab.free = [slot for slot in slab.free if slot not in taken]


def _first(resets: dict[bytes, int], namespace: bytes) -> int:
    """The first number after the namespace's last reset; 0 without one."""
    return resets.get(namespace, resets.get(b"", 0))


def _run(first: int, region: SlotRegion, slots: list[int], numbers: list[int]) -> SlotRun:
    slab_number = slots[0] >> _SLAB_BITS
    place = region.slabs[slab_number].place
    base = slab_number << _SLAB_BITS
    packed = array("I", slots).tobytes(), array("Q", numbers).tobytes()
    return SlotRun(first, region.id, base, place.offset, place.slot_bytes, *packed)
