"""What hit rates must be: an exact simulation of the pool's LRU, of private caches beside it, and of a cache without bound. Pure.

One request after the other, as the demo sends them. A request is the keys of its chunks in prefix order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import msgspec

Prompts = Sequence[Sequence[Hashable]]


class Outcome(msgspec.Struct, frozen=True):
    """Chunks by request: retrieved, and stored; `evictions` in all."""

    hits: list[int]
    stored: list[int]
    evictions: int


class Pool:
    """`capacity` chunks of one size, least recently used evicted first: the server's rules, without leases, since nothing overlaps."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._recent: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def retrieve(self, keys: Sequence[Hashable]) -> int:
        """How many leading chunks are there. They become recent, the first one most."""
        found = 0
        while found < len(keys) and keys[found] in self._recent:
            found += 1
        self._touch(keys[:found])
        return found

    def store(self, keys: Sequence[Hashable], retrieved: int) -> int:
        """Reserve, then commit what comes after the first `retrieved` chunks; how many were stored.

        Slots are reserved in prefix order, each evicting the coldest committed chunk when none is free; the rest is left out
        once none is left to evict. The new chunks and the prefix before them become recent, the first of all most.
        """
        reserved: list[Hashable] = []
        for key in keys[retrieved:]:
            if key in self._recent:
                continue
            if len(self._recent) + len(reserved) >= self.capacity:
                if not self._recent:
                    break
                self._recent.popitem(last=False)
                self.evictions += 1
            reserved.append(key)
        for key in reversed(reserved):
            self._recent[key] = None
        if reserved:
            self._touch(keys[:retrieved])
        return len(reserved)

    def _touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self._recent:
                self._recent.move_to_end(key)


def private(prompts: Prompts, capacity: int, workers: int) -> Outcome:
    """Request i goes to worker i mod `workers`, each with a cache of its own of `capacity` / `workers` chunks."""
    pools = [Pool(capacity // workers) for _ in range(workers)]
    hits, stored = [], []
    for at, keys in enumerate(prompts):
        pool = pools[at % workers]
        hits.append(pool.retrieve(keys))
        stored.append(pool.store(keys, hits[-1]))
    return Outcome(hits, stored, sum(pool.evictions for pool in pools))


def shared(prompts: Prompts, capacity: int) -> Outcome:
    """One pool for all workers, whoever asks."""
    return private(prompts, capacity, 1)


def infinite(prompts: Prompts) -> Outcome:
    """The ceiling: nothing is ever evicted."""
    return shared(prompts, unique(prompts))


def unique(prompts: Prompts) -> int:
    """How many different chunks there are: the working set."""
    return len({key for keys in prompts for key in keys})
