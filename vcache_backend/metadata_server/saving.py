"""Chunks about to be evicted that the offload tier has not: who saves them, which go next, and which evictions lost something.

Savers ask (`Save`): nothing is pushed and no eviction waits for them. Which chunks are saved is not in the journal: after a restart
they are offered again, and the saver that finds them below says so without a copy. Pure: the clock is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from vcache_backend.metadata_server.leases import Leases
from vcache_backend.metadata_server.messages import NAMESPACE_BYTES, RANK_BYTES, Medium, SegmentId
from vcache_backend.metadata_server.placement import Entry, Placement

SAVER_SECONDS = 10.0
"""So long after it last asked a saver counts as one. One whose connection is gone counts no more."""
MAX_SAVERS = 4096
MAX_FORGOTTEN = 64
"""Most savers whose time is over that one look forgets."""
MAX_SCAN = 4096
"""Most chunks one `Save` looks at, from the coldest on: a millisecond of the server's time."""
LOOK_AHEAD = 128
"""Most unsaved chunks an eviction passes over in search of saved ones."""


class Saver(msgspec.Struct, frozen=True):
    """Who saves: chunks of one namespace and rank, on `device` before those elsewhere."""

    namespace: bytes
    rank: int
    device: str


class Saving:
    """The savers, and what `Entry.saved` and `Entry.saving` mean. Called from the server's one thread.

    ahead: the share of the pool, counted from the next victim on, that should be saved or free.
    """

    def __init__(self, ahead: float, placement: Placement, leases: Leases) -> None:
        self._ahead = ahead
        self._placement = placement
        self._leases = leases
        self._savers: dict[Saver, tuple[int, float]] = {}
        self._namespaces: Counter[bytes] = Counter()
        self._doubts: dict[bytes, int] = {}

    def is_saved(self, entry: Entry) -> bool:
        """Has the offload tier this chunk, as far as was said since it was last doubted?"""
        return entry.saved > self._doubts.get(entry.key[:NAMESPACE_BYTES], 0)

    def mark(self, entry: Entry) -> None:
        """The offload tier has this chunk."""
        entry.saved = self._doubts.get(entry.key[:NAMESPACE_BYTES], 0) + 1

    def doubt(self, namespace: bytes) -> None:
        """The offload tier may have lost this namespace. Takes no longer for many chunks than for one."""
        if len(self._doubts) < MAX_SAVERS or namespace in self._doubts:
            self._doubts[namespace] = self._doubts.get(namespace, 0) + 1

    def active(self, now: float) -> bool:
        """Does anybody save? Where nobody does, this costs next to nothing."""
        for _ in range(MAX_FORGOTTEN):
            oldest = next(iter(self._savers), None)
            if oldest is None or self._savers[oldest][1] > now:
                break
            self._forget(oldest)
        return bool(self._savers) and self._savers[next(reversed(self._savers))][1] > now

    def asked(self, saver: Saver, client: int, now: float) -> None:
        """A client asks for something to save."""
        if saver in self._savers:
            self._forget(saver)
        if self.active(now) and len(self._savers) == MAX_SAVERS:
            self._forget(next(iter(self._savers)))
        self._savers[saver] = client, now + SAVER_SECONDS
        self._namespaces[saver.namespace] += 1

    def drop_client(self, client: int) -> None:
        """The client is gone; what only it could save others may now."""
        for saver in [saver for saver, (owner, _) in self._savers.items() if owner == client]:
            self._forget(saver)

    def choose(self, saver: Saver, medium: Medium, coldest: Iterator[Entry], limit: int) -> list[Entry]:
        """Up to `limit` chunks for this saver, coldest first: not saved, and in nobody's hands for it.

        They lie in the coldest part of the medium's segments that together with their free room makes up the share to keep ahead.
        """
        free, total = self._placement.free_and_total(medium)
        budget = total * self._ahead - free
        if budget <= 0:
            return []
        mine = self._segments(saver, medium)
        suffix = saver.rank.to_bytes(RANK_BYTES, "big")
        chosen: list[Entry] = []
        for entry in islice(coldest, MAX_SCAN):
            location = entry.location
            may = mine.get(location.segment)
            if may is None:
                continue
            wanted = may and not self.is_saved(entry) and entry.key.startswith(saver.namespace) and entry.key.endswith(suffix)
            if wanted and entry.saving not in self._leases:
                chosen.append(entry)
            budget -= location.length
            if budget <= 0 or len(chosen) == limit:
                break
        return chosen

    def prefer_saved(self, coldest: Iterator[Entry]) -> Iterator[Entry]:
        """The same chunks; those that can go without loss come before up to `LOOK_AHEAD` that cannot. Soft pins keep their place."""
        passed: list[Entry] = []
        namespaces = self._namespaces
        for entry in coldest:
            lost = not self.is_saved(entry) and not entry.leases and entry.key[:NAMESPACE_BYTES] in namespaces
            if entry.pin or (lost and len(passed) == LOOK_AHEAD):
                yield from passed
                yield entry
                yield from coldest
                return
            if lost:
                passed.append(entry)
            else:
                yield entry
        yield from passed

    def only_saved(self, coldest: Iterator[Entry]) -> Iterator[Entry]:
        """Of the first `MAX_SCAN` chunks, those that can go without loss."""
        namespaces = self._namespaces
        return (e for e in islice(coldest, MAX_SCAN) if self.is_saved(e) or e.key[:NAMESPACE_BYTES] not in namespaces)

    def lost(self, victims: list[Entry]) -> int:
        """How many of them go unsaved though somebody saves their namespace."""
        return sum(not self.is_saved(victim) and victim.key[:NAMESPACE_BYTES] in self._namespaces for victim in victims)

    def _segments(self, saver: Saver, medium: Medium) -> dict[SegmentId, bool]:
        """The segments of the medium: may this saver save from them? Not from one on the device of another that saves the same."""
        mine: dict[SegmentId, bool] = {}
        for id_, segment in self._placement.segments.items():
            if segment.medium == medium and not segment.draining:
                there = Saver(saver.namespace, saver.rank, segment.device)
                mine[id_] = there == saver or there not in self._savers
        return mine

    def _forget(self, saver: Saver) -> None:
        del self._savers[saver]
        self._namespaces[saver.namespace] -= 1
        if not self._namespaces[saver.namespace]:
            del self._namespaces[saver.namespace]
