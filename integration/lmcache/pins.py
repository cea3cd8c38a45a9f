"""The leases that look-ups took for requests which are still to be loaded, or which never will be."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from lmcache.utils import CacheEngineKey

from vcache_backend.transfer.chunk_io import Lease

MOST = 1024
NOTHING_SECONDS = 30.0
"""How long a look-up that leased nothing is remembered."""


class Pins:
    """Leases by the first key of their look-up, oldest first. LMCache ends a look-up by that key, so all of one key are alike. Any
    thread."""

    def __init__(self, let_go: Callable[[Lease], None]) -> None:
        self._let_go = let_go
        self._held: dict[CacheEngineKey, list[Lease]] = {}
        self._taken: Counter[CacheEngineKey] = Counter()
        self._lock = threading.Lock()

    def keep(self, key: CacheEngineKey, lease: Lease | None) -> None:
        """Until `end` or `take`. None: the look-up found something, but not in the pool; its `end` must not be another's."""
        if lease is None:
            lease = Lease(0, [], [], time.monotonic() + NOTHING_SECONDS, NOTHING_SECONDS, -1)
        with self._lock:
            if len(self._held) >= MOST:
                self._held = {key: there for key, there in self._held.items() if there and there[-1].seconds_left}
                self._taken = +self._taken
            # Look-ups of requests that were never scheduled leave theirs behind.
            self._held[key] = [there for there in self._held.get(key, ()) if there.seconds_left] + [lease]

    def end(self, key: CacheEngineKey) -> bool:
        """End the oldest lease of a look-up that began with `key`; nothing for the keys after it."""
        with self._lock:
            if self._taken[key]:
                self._taken[key] -= 1
                return True
            leases = [lease for lease in self._held.pop(key, ()) if lease.seconds_left]
            lease = leases.pop(0) if leases else None
            if leases:
                self._held[key] = leases
        if lease is not None and lease.id:
            self._let_go(lease)
        return lease is not None

    def take(self, key: CacheEngineKey, covers: Callable[[Lease], int]) -> Lease | None:
        """The lease that covers most, which the caller ends; None if none covers anything."""
        with self._lock:
            leases = self._held.get(key, [])
            lease = max(leases, key=covers, default=None)
            if lease is None or not covers(lease):
                return None
            leases.remove(lease)
            # Its `end` is still to come, and must not end another request's lease.
            self._taken[key] += 1
            return lease
