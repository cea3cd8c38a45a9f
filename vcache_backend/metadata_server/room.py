"""The pool's slots: where each chunk is, when it was used, and which one leaves for another. Pure:
a clock, no socket."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from vcache_backend.metadata_server.processes import Peer
from vcache_backend.metadata_server.slots import SLAB_BITS, SLABS, SlotRegion
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import SLOTS

SLOT_BITS = SLOTS.bit_length() - 1
SLOT_MASK = SLOTS - 1


class Room:
    """Chunks in slots of regions. A place is a region's number and a slot of its table, as one
    integer."""

    SEARCH = 64
    """How many chunks of other sizes may be older before a slab changes its size."""
    MAX_SEARCH = 2048
    """The most chunks that one request passes over to evict others: a few milliseconds."""

    MAX_CHUNKS = 4_000_000
    """The most chunks, some 300 B of memory each."""

    def __init__(self, now: Callable[[], float], counters: Counter[str]) -> None:
        self._now, self._counters = now, counters
        self.regions: dict[int, SlotRegion] = {}
        self.chunks = OrderedDict[m.ChunkKey, int]()
        """The place of each committed chunk, the least recently used first."""

    def at(self, place: int) -> tuple[SlotRegion, int]:
        return self.regions[place >> SLOT_BITS], place & SLOT_MASK

    def put(self, key: m.ChunkKey, place: int) -> None:
        self.chunks[key] = place
        self.regions[place >> SLOT_BITS].chunks += 1

    def use(self, keys: list[m.ChunkKey], places: list[int], until: float = 0.0) -> None:
        """Make chunks recent, the first most of all, and keep them until a time."""
        for key, place in zip(reversed(keys), reversed(places), strict=True):
            region, slot = self.at(place)
            if until > region.pins[slot]:
                region.pins[slot] = until
            self.chunks.move_to_end(key)

    def evict(self, *keys: m.ChunkKey) -> None:
        """Forget chunks. Their slots are free."""
        for region, slot in map(self.at, self.forget(keys)):
            region.give(slot)

    def forget(self, keys: Sequence[m.ChunkKey]) -> list[int]:
        """Forget chunks. Returns their places, which the caller grants to others, or frees."""
        places = [self.chunks.pop(key) for key in keys]
        for region, slot in map(self.at, places):
            region.void(slot)
            region.pins[slot] = 0.0
            region.chunks -= 1
        return places

    def take(self, client: Peer, size: int, most: int, pending: int) -> list[int]:
        """Take up to so many slots of this size, which the caller grants at once: free ones, on the
        client's device first, then those of the least recently used chunks. pending: how many
        chunks are being written."""
        allowed = max(self.MAX_CHUNKS - len(self.chunks) - pending, 0)
        taken = list(islice(self._free_slots(client, size), min(most, allowed)))
        looks = self.MAX_SEARCH
        while len(taken) < most and looks > 0:
            equal, others, passed = self._victims(client, size, most - len(taken), looks)
            looks -= max(len(passed), self.MAX_SEARCH // 8)
            new = self._leave(equal)
            while others and not new:
                at = others.pop(0)
                if self._resized(at, size):
                    new = list(islice(self._of_slab(*divmod(at, SLABS), size), most - len(taken)))
            if not new:  # let the next search begin behind them
                for key in passed:
                    self.chunks.move_to_end(key)
                if len(passed) >= len(self.chunks):
                    break
            taken += new
        return taken

    def _leave(self, keys: Sequence[m.ChunkKey]) -> list[int]:
        """The places of chunks that leave for others."""
        places = self.forget(keys)
        for place in places:
            self.regions[place >> SLOT_BITS].evictions += 1
        self._counters["evicted"] += len(places)
        return places

    def _free_slots(self, client: Peer, size: int) -> Iterator[int]:
        rank = {
            n: (r.device != client.device, -r.unused)
            for n, r in self.regions.items()
            if r.unused >= size and usable(r, client)
        }
        for number in sorted(rank, key=rank.__getitem__):
            region = self.regions[number]
            for slab in count():
                if slab == len(region.slabs) and region.cut(size) is None:
                    break
                here = region.slabs[slab]
                if here.slot_bytes != size <= here.nbytes and here.empty:
                    region.resize(slab, size)
                yield from self._of_slab(number, slab, size)

    def _of_slab(self, number: int, slab_number: int, size: int) -> Iterator[int]:
        region = self.regions[number]
        slab = region.slabs[slab_number]
        while slab.slot_bytes == size and slab.free:
            region.unused -= size
            yield number << SLOT_BITS | slab_number << SLAB_BITS | slab.free.pop()

    def _victims(
        self, client: Peer, size: int, most: int, looks: int
    ) -> tuple[list[m.ChunkKey], list[int], list[m.ChunkKey]]:
        """The least recently used chunks of this size, until `SEARCH` chunks of other sizes or
        `looks` of any kind that stay were used before; the slabs of those of other sizes; all that
        stay."""
        now, equal, others = self._now(), list[m.ChunkKey](), dict[int, None]()
        passed, since = list[m.ChunkKey](), 0
        sizes = {
            number * SLABS + at: slab.slot_bytes
            for number, region in self.regions.items()
            if usable(region, client)
            for at, slab in enumerate(region.slabs)
            if slab.nbytes >= size
        }
        for key, place in self.chunks.items():
            at = place >> SLAB_BITS
            may_go = at in sizes and self.regions[at // SLABS].pins[place & SLOT_MASK] <= now
            if may_go and sizes[at] == size:
                equal.append(key)
                since = 0
            else:
                passed.append(key)
                if may_go:
                    others[at] = None
                    since += 1
            if len(equal) == most or since == self.SEARCH or len(passed) == looks:
                break
        return equal, list(others), passed

    def _resized(self, at: int, size: int) -> bool:
        """Evict all chunks of a slab, unless one is pinned or being written, and change its slots'
        size."""
        number, slab_number = divmod(at, SLABS)
        region = self.regions[number]
        slab, first = region.slabs[slab_number], slab_number << SLAB_BITS
        if max(region.pins[first : first + slab.slots]) > self._now():
            return False
        used = list(region.occupied(first, slab.slots))
        if not all(one.committed for one in used):
            return False
        for place in self._leave([one.key for one in used]):
            region.give(place & SLOT_MASK)
        region.resize(slab_number, size)
        return True


def usable(region: SlotRegion, client: Peer) -> bool:
    """Whether a client may store in a segment."""
    return region.medium == client.medium and region.id not in client.avoids
