"""Where the tokens of a hit lay, as vLLM counts them by source from 0.32 on."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from vcache_backend.errors import VCacheError

from .introduction import Introduction
from .metadata import LoadSpec
from .tracked import Tracked

NAMES = {"own": "device", "peer": "p2p", "host": "host"}
"""Where segments lie, in vLLM's words. Another instance's KV cache is `p2p`; of the offload tier, which may lie anywhere, vLLM's own
connectors say nothing."""


def split(instance: Introduction, tracked: Tracked, load: LoadSpec, external: int, size: int) -> dict[str, int]:
    """The `external` tokens that vLLM hopes for of a load, by where they lie for the first worker; as many as that is known of.

    size: tokens of a chunk. Asks the server, once, about what is loaded without a lease, unless all of the pool lies in one place.
    """
    first, end = tracked.local // size, tracked.local + external
    tokens = Counter[str]()
    for number, name in enumerate(_names(instance, tracked, load, first, -(-end // size)), first):
        if name:
            tokens[name] += min(end, (number + 1) * size) - max(tracked.local, number * size)
    return dict(tokens)


def _names(instance: Introduction, tracked: Tracked, load: LoadSpec, first: int, stop: int) -> list[str]:
    """Of the chunks [first, stop), "" of one of which it is not known."""
    answer, everywhere = tracked.answer, {NAMES[place] for place in instance.places.values()}
    if tracked.params.announced:
        # Another instance computes them; those that are pooled may yet be anywhere.
        everywhere = {"p2p"} if instance.shared is not None else everywhere
        return [everywhere.pop() if len(everywhere) == 1 else "p2p"] * (stop - first)
    names = ["p2p" if number in load.residents else "" for number in range(stop - first)]
    pooled = [number for number, name in enumerate(names) if not name and answer is not None and first + number < answer.pooled]
    if len(everywhere) == 1:
        segments, named = [""] * len(pooled), {"": everywhere.pop()}
    else:
        named = {id_: NAMES[place] for id_, place in instance.places.items()}
        segments = _segments(instance, tracked, load, first, pooled)
    for number, segment in zip(pooled, segments, strict=False):
        names[number] = named.get(segment, "")
    return names


def _segments(instance: Introduction, tracked: Tracked, load: LoadSpec, first: int, pooled: list[int]) -> list[str]:
    """In which these chunks, numbered from the first one, lie."""
    if load.lease is not None:
        return [load.lease.locations[number * load.lease.ranks].segment for number in pooled]
    if instance.client is not None and pooled:
        with suppress(VCacheError):
            return instance.client.segments_of([tracked.keys[first + number] for number in pooled])
    return []
