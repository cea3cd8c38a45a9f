"""Says how much of a GPU the pool may take beside vLLM. Pure functions of numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from vcache_backend.config import ByteSize

MAX_SHARE = 0.95
"""The part of a GPU that the pool and vLLM's gpu_memory_utilization may take together. Contexts,
graphs and workspaces need the rest."""
LEAST = ByteSize(1 << 30)
"""The least that a pool of the default size may have if the whole does not fit."""
_ROUNDING = 1e-9


class Shortfall(NamedTuple):
    """A pool that does not fit."""

    said: str
    """Why, and what to set."""
    fits: int
    """The bytes that may be allocated now instead of all."""


def most_utilization(total: int, segment: int) -> float:
    """The largest gpu_memory_utilization beside a segment of `segment` bytes, rounded down to two
    digits; 0.0: nothing is left."""
    share = MAX_SHARE - segment / total
    return max(0.0, math.floor(share * 100 + _ROUNDING) / 100)


def most_segment(total: int, utilization: float) -> ByteSize:
    """The largest segment beside a vLLM of this gpu_memory_utilization; 0: nothing is left."""
    return ByteSize(max(0, math.floor(total * (MAX_SHARE - utilization) + _ROUNDING)))


def shortfall(
    total: int, free: int, segment: int, new: int, utilization: float | None
) -> Shortfall | None:
    """None if a pool of `segment` bytes fits on a GPU of `total` bytes, of which `free` are free
    now. A smaller pool leaves free what contexts, graphs and workspaces need.

    new: bytes of the segment that are not allocated yet. A segment that outlived its worker is
    allocated already, but counts in the budget, too. utilization: vLLM's gpu_memory_utilization;
    None if it is unknown or does not apply (kv_cache_memory_bytes)."""
    said = _trouble(total, free, segment, new, utilization) if segment else ""
    if not said:
        return None
    room = free - total + most_segment(total, 0.0)
    if utilization is not None:
        room = min(room, most_segment(total, utilization) - (segment - new))
    return Shortfall(said, int(_whole_mib(max(0, min(room, new)))))


def _trouble(total: int, free: int, segment: int, new: int, utilization: float | None) -> str:
    size = ByteSize(segment)
    if most_utilization(total, segment) <= 0:
        most = most_segment(total, MAX_SHARE / 2).about
        leaves = f"pool.segment_bytes {size} leaves nothing of {ByteSize(total).about} for vLLM"
        return f"{leaves}: set it to {most} or less"
    if utilization is not None and utilization + segment / total > MAX_SHARE + _ROUNDING:
        both = f"gpu_memory_utilization {utilization:g} and pool.segment_bytes {size}"
        taken = f"{both} are {utilization + segment / total:.1%}"
        first = f"set gpu_memory_utilization to {most_utilization(total, segment):.2f} or less"
        room = _whole_mib(most_segment(total, utilization))
        second = f", or pool.segment_bytes to {room} or less" if room else ""
        return f"{taken} of {ByteSize(total).about}, more than {MAX_SHARE:.0%}: {first}{second}"
    if new > free:
        lacks = f"{ByteSize(new)} of pool.segment_bytes are more than the {ByteSize(free).about}"
        less = f"set pool.segment_bytes to {_whole_mib(free)} or less"
        return f"{lacks} that are free: {less}, or gpu_memory_utilization lower"
    return ""


def _whole_mib(nbytes: int) -> ByteSize:
    """Rounded down to whole MiB, so that the value in a message fits."""
    return ByteSize(nbytes >> 20 << 20)
