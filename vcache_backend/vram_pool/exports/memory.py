"""Memory for torch's tensors that other processes can map, such as the memory of a KV cache.

torch uses the memory as always. A descriptor of every allocation lives as long as the
allocation."""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """One exported allocation: `nbytes` bytes at `address`. Readers map all of it by `fd`.

    The fd is open for as long as the memory lives; the caller must not close it."""

    fd: int
    nbytes: int
    address: int
