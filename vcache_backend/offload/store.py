"""What a offload tier is: named, immutable objects of bytes. `mooncake.py` is one; another needs nothing but this."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from vcache_backend.errors import VCacheError


class StoreDown(VCacheError):
    """The store, or its connection, failed; nothing is known about the objects. Counts against its breaker."""


class Span(NamedTuple):
    """`nbytes` bytes of this process's host memory at `address`."""

    address: int
    nbytes: int


class Put(Enum):
    """What became of one object. Only STORED says that it can be read; the store may have had it before."""

    STORED = "stored"
    FULL = "full"
    """No room now. Again later may do."""
    TOO_LARGE = "too_large"
    FAILED = "failed"
    """Its bytes did not arrive, or nobody knows. A half written object is never shown under its name by a store."""


class ObjectStore(Protocol):
    """Objects by name, first writer wins. Whoever puts and reads checks their contents: see objects.py.

    Calls block as long as the store's own library does, which may be half a minute where a peer hangs: only the tier's own threads
    call them, several at a time. Memory handed to `put` or `get_into` must stay as it is until the call returns. All raise
    StoreDown, at once if the store is not open, and nothing else. In a forked child every call raises StoreDown.
    """

    @property
    def is_open(self) -> bool:
        """May calls be made?"""
        ...

    def open(self) -> None:
        """Connect. May be called again after a failure, or when `is_open` became False."""
        ...

    def register(self, memory: Span, fd: int = -1) -> None:
        """Memory that objects will be put from and read into, once, before the first `open` or after. fd: of a memfd of its size, which
        it is the whole of, for stores in another process; stays the caller's, and open for as long as the store is."""
        ...

    def contains_prefix(self, names: Sequence[str]) -> int:
        """How many leading objects are there, in one batched call. Never counts an error as an object."""
        ...

    def put(self, names: Sequence[str], sources: Sequence[Span]) -> list[Put]:
        """Write objects, in one batched call."""
        ...

    def get_into(self, names: Sequence[str], targets: Sequence[Span]) -> list[int]:
        """Read objects, in one batched call: the bytes of each, 0 if it is not there or could not be read.

        A target may be larger than its object, whose bytes are then the first of it.
        """
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Forget objects, also such as are being read."""
        ...

    def remove_under(self, start: str) -> int:
        """Forget all objects whose names begin with `start`, whoever wrote them, also such as are being read: how many."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters as plain values, for people."""
        ...

    def close(self, seconds: float) -> bool:
        """Wait, at most so long, for the calls under way, and leave. False if one of them goes on: its memory is still in use.
        Idempotent. Never hangs longer, never crashes."""
        ...
