"""Memory for torch's tensors that other processes can map, such as a KV cache's.

torch uses it as always. Every allocation has a descriptor that lives as long."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Region(NamedTuple):
    """One exported allocation: `nbytes` bytes at `address`. Readers map all of it by `fd`.

    The fd is open for as long as the memory lives; the caller must not close it."""

    fd: int
    nbytes: int
    address: int


class Exportable(Protocol):
    """A source of exportable memory, from which torch allocates within `context`."""

    def context(self) -> AbstractContextManager[None]:
        """A context in which this thread's allocations are exportable if they could be a KV cache.
        For lack of memory torch raises.

        May be left from another thread, and before contexts that were entered later."""

    def allocations(self) -> list[Region]:
        """The allocations that are alive."""

    @property
    def problem(self) -> str:
        """Why an allocation did not become exportable; empty if all did."""
