"""Memory that torch allocates as always and that other processes can map: what vLLM's KV cache is made of where it is shared in place.

torch asks for it, uses it and frees it, and every allocation has a descriptor that lives as long as the memory does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol


class Region(NamedTuple):
    """One exported allocation of this process: `nbytes` at `address`, all of which a reader must map, by `fd`, which is open as long as the
    memory is, and not the caller's."""

    fd: int
    nbytes: int
    address: int


class Exportable(Protocol):
    """Where torch takes memory from while a context is entered."""

    def context(self) -> AbstractContextManager[None]:
        """Within it this thread's allocations that could be a KV cache are exportable ones. Never raises for lack of memory: torch does.

        May be left from another thread, and while contexts that were entered later are not left yet.
        """

    def allocations(self) -> list[Region]:
        """Those that are alive."""

    @property
    def problem(self) -> str:
        """Why an allocation did not become exportable, if one did not."""
