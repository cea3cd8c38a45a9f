"""Tells vLLM 0.32 and later where the tokens of a hit lay."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from vcache_backend.errors import VCacheError

from ..metadata import LoadSpec
from .introduction import Introduction
from .tracked import Tracked

NAMES = {"own": "device", "peer": "p2p", "host": "host"}
"""vLLM's names for the places of segments. Another instance's KV cache is `p2p`. The offload tier
has no name, since its bytes may lie anywhere."""


def split(
    instance: Introduction, tracked: Tracked, load: LoadSpec, external: int, size: int
) -> dict[str, int]:
    """Count the `external` tokens of a load by place, as the first worker sees the places. Tokens
    in an unknown place are left out.

    size: tokens of a chunk. Asks the server once, about chunks in the pool, unless all segments lie
    in one place."""
    first, end = tracked.local // size, tracked.local + external
    stop, tokens = -(-end // size), Counter[str]()
    if sum(run.chunks for run in load.residents) == stop - first:
        return {"p2p": external}
    for number, name in enumerate(_names(instance, tracked, load, first, stop), first):
        if name:
            tokens[name] += min(end, (number + 1) * size) - max(tracked.local, number * size)
    return dict(tokens)


def _names(
    instance: Introduction, tracked: Tracked, load: LoadSpec, first: int, stop: int
) -> list[str]:
    """Name the place of each of the chunks [first, stop); "" if unknown."""
    answer, everywhere = tracked.lookup.answer, {NAMES[place] for place in instance.places.values()}
    names = [""] * (stop - first)
    for run in load.residents:
        names[run.first : run.stop] = ["p2p"] * run.chunks
    pooled = [
        number
        for number, name in enumerate(names)
        if not name and answer is not None and first + number < answer.pooled
    ]
    if len(everywhere) == 1:
        segments, named = [""] * len(pooled), {"": everywhere.pop()}
    else:
        named = {id_: NAMES[place] for id_, place in instance.places.items()}
        segments = _segments(instance, tracked, first, pooled)
    for number, segment in zip(pooled, segments, strict=False):
        names[number] = named.get(segment, "")
    return names


def _segments(instance: Introduction, tracked: Tracked, first: int, pooled: list[int]) -> list[str]:
    """Ask the server for the segments of these chunks, numbered from `first`. Empty if it does not
    answer.
    """
    if instance.client is not None and pooled:
        with suppress(VCacheError):
            return instance.client.segments_of(
                [tracked.lookup.keys[first + number] for number in pooled]
            )
    return []
