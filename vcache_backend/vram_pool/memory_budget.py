"""How much of a GPU the pool may take beside vLLM. Pure: numbers in, a sentence out."""

from __future__ import annotations

import math

from vcache_backend.config import ByteSize

MAX_SHARE = 0.95
"""Pool plus vLLM's gpu_memory_utilization may take this part of a GPU; the rest is contexts, graphs and workspaces."""
_ROUNDING = 1e-9


def most_utilization(total: int, segment: int) -> float:
    """The largest gpu_memory_utilization beside a segment of `segment` bytes, two digits, rounded down; 0.0: nothing is left."""
    share = MAX_SHARE - segment / total
    return max(0.0, math.floor(share * 100 + _ROUNDING) / 100)


def most_segment(total: int, utilization: float) -> ByteSize:
    """The largest segment beside a vLLM of this gpu_memory_utilization; 0: nothing is left."""
    return ByteSize(max(0, math.floor(total * (MAX_SHARE - utilization) + _ROUNDING)))


def shortfall(total: int, free: int, segment: int, new: int, utilization: float | None) -> str | None:
    """None if `segment` bytes of pool fit on a GPU of `total` bytes with `free` bytes free now, else what is wrong and what to set.

    new: how many of them are yet to be made. What outlived its worker is in use already, yet counts in the budget all the same.
    utilization: vLLM's gpu_memory_utilization, None where it is unknown or does not apply (kv_cache_memory_bytes).
    """
    size = ByteSize(segment)
    if not segment:
        return None
    if most_utilization(total, segment) <= 0:
        most = most_segment(total, MAX_SHARE / 2).about
        return f"pool.segment_bytes {size} leaves nothing of {ByteSize(total).about} for vLLM: set it to {most} or less"
    if utilization is not None and utilization + segment / total > MAX_SHARE + _ROUNDING:
        taken = f"gpu_memory_utilization {utilization:g} and pool.segment_bytes {size} are {utilization + segment / total:.1%}"
        first = f"set gpu_memory_utilization to {most_utilization(total, segment):.2f} or less"
        room = _whole_mib(most_segment(total, utilization))
        second = f", or pool.segment_bytes to {room} or less" if room else ""
        return f"{taken} of {ByteSize(total).about}, more than {MAX_SHARE:.0%}: {first}{second}"
    if new > free:
        advice = f"set pool.segment_bytes to {_whole_mib(free)} or less, or gpu_memory_utilization lower"
        return f"{ByteSize(new)} of pool.segment_bytes are more than the {ByteSize(free).about} that are free: {advice}"
    return None


def _whole_mib(nbytes: int) -> ByteSize:
    """Rounded down, so that what a message says to set does fit."""
    return ByteSize(nbytes >> 20 << 20)
