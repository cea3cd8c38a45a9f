"""The look-ups of requests which are still to be loaded, or which never will be, and their leases."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache.utils import CacheEngineKey

from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.leases import Lease

MOST = 1024
NOTHING_SECONDS = 30.0
"""How long a look-up that leased nothing is remembered."""


@dataclass
class Pin:
    """One look-up: what its chunks are called, and the lease on the leading ones; None if the pool had none."""

    names: list[ChunkKey]
    lease: Lease | None
    made: float = field(default_factory=time.monotonic)

    @property
    def lives(self) -> bool:
        return bool(self.lease.seconds_left) if self.lease is not None else time.monotonic() < self.made + NOTHING_SECONDS


class Pins:
    """Look-ups by their first key, oldest first. LMCache ends a look-up by that key, so all of one key are alike. Any thread."""

    def __init__(self, release: Callable[[Lease], None]) -> None:
        self._release = release
        self._held: dict[CacheEngineKey, list[Pin]] = {}
        self._taken: Counter[CacheEngineKey] = Counter()
        self._lock = threading.Lock()

    def keep(self, key: CacheEngineKey, pin: Pin) -> None:
        """Until `end` or `take`. A look-up without a lease is kept too: its `end` must not be another's."""
        with self._lock:
            if len(self._held) >= MOST:
                self._held = {key: there for key, there in self._held.items() if there and there[-1].lives}
                self._taken = +self._taken
            # Look-ups of requests that were never scheduled leave theirs behind.
            self._held[key] = [there for there in self._held.get(key, ()) if there.lives] + [pin]

    def end(self, key: CacheEngineKey) -> bool:
        """End the oldest look-up that began with `key`; nothing for the keys after it."""
        with self._lock:
            if self._taken[key]:
                self._taken[key] -= 1
                return True
            pins = [pin for pin in self._held.pop(key, ()) if pin.lives]
            pin = pins.pop(0) if pins else None
            if pins:
                self._held[key] = pins
        if pin is not None and pin.lease is not None:
            self._release(pin.lease)
        return pin is not None

    def take(self, key: CacheEngineKey, covers: Callable[[Pin], int]) -> Pin | None:
        """The look-up whose lease covers most, which the caller ends; None if none covers anything."""
        with self._lock:
            pins = self._held.get(key, [])
            pin = max(pins, key=covers, default=None)
            if pin is None or not covers(pin):
                return None
            pins.remove(pin)
            # Its `end` is still to come, and must not end another request's lease.
            self._taken[key] += 1
            return pin
