"""Whether anything is lost that was computed: Mooncake's conversation trace through two engines whose pool is four times too small.

Requests follow one another as fast as they can, on one engine and the other in turn: look up, retrieve, compute, store the rest. The
KV is tiny, 64 B a token, but every byte of it says which token it belongs to, and is checked. Hits are counted in chunks of 512 tokens,
one id of the trace, and compared with those of a cache that forgets nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from vcache_backend.config import OffloadConfig

from . import trace
from .kv import BLOCK_SIZE, GIB, KV, Size, threads
from .mooncake_store import Site
from .results import Row, load, row

CHUNK = trace.BLOCK_TOKENS
TOO_SMALL = 4
MOST_BLOCKS = 1 << 13
SIZE = Size(layers=1, heads=1, dim=16, chunks=MOST_BLOCKS * BLOCK_SIZE // CHUNK, chunk_tokens=CHUNK)


def run(requests: Sequence[trace.Request] = (), through: bool = False) -> Row:
    """`mooncake_trace_hit_rate`. Without requests, those of the excerpt.

    through: wait after each request until its chunks are in the store. Else one that is evicted between its copy out of the pool and
    the end of its writing is nowhere for that long.
    """
    requests = requests or trace.excerpt()
    expected = infinite(requests)
    unique = len({id_ for request in requests for id_ in whole(request)})
    with Site(int(1.5 * unique * SIZE.chunk_bytes) + GIB // 16) as site, threads(1):
        replay = Replay(site, unique * SIZE.chunk_bytes // TOO_SMALL, site.depot.offload())
        for number, request in enumerate(requests):
            replay.one(number, request, expected[number], through)
        causes = replay.causes()
    chunks = sum(len(whole(request)) for request in requests)
    what = f"{len(requests)} requests, {chunks} chunks, {unique} different, pool for {unique // TOO_SMALL}, write_through"
    what = f"{what}; misses that an infinite cache has not: {json.dumps(causes)}; {load()}"
    return row("mooncake_trace_hit_rate", "hits", sum(replay.hits) / chunks, sum(expected) / chunks, what=what, at_least=1.0)


class Replay:
    """Two engines of a node with one pool."""

    def __init__(self, site: Site, pool_bytes: int, offload: OffloadConfig) -> None:
        place, self._kv = site.node(), KV(SIZE)
        self._engines = [site.engine(place, self._kv, pool_bytes // 2, offload) for _ in range(2)]
        self.hits: list[int] = []
        self._lost: Counter[str] = Counter()

    def one(self, number: int, request: trace.Request, expected: int, through: bool) -> None:
        """Serve a request, of which a cache that forgets nothing has `expected` chunks. Raises RuntimeError for a wrong byte."""
        engine, tokens = self._engines[number % 2], torch.from_numpy(trace.tokens(request))
        slots = self._kv.slots[: len(tokens)]
        found = engine.lookup(tokens)
        self._kv.poison()
        got = engine.retrieve(tokens, None, self._kv.tensors, slots)
        hit = int(got.sum()) // CHUNK
        self._check(tokens[: hit * CHUNK], slots[: hit * CHUNK])
        if hit > expected:
            raise RuntimeError(f"request {number}: {hit} chunks are hits, of which only {expected} were ever stored")
        if hit < expected:
            where = {0: "in the pool", 1: "in the store", -1: "nowhere"}[engine.contains(engine.keys(tokens)[hit])]
            self._lost[f"{'not found' if found // CHUNK <= hit else 'found, not read'}, now {where}"] += 1
        self.hits.append(hit)
        for rows in self._rows():
            rows[:, slots] = tokens[None, :, None]
        engine.store(tokens, got.logical_not(), self._kv.tensors, slots)
        engine.flush(60.0, through)

    def causes(self) -> dict[str, Any]:
        """Where the chunks were that ended a hit too early, and what both engines say went wrong."""
        causes: Counter[str] = Counter(self._lost)
        for engine in self._engines:
            stats = engine.get_stats()
            causes.update({f"dropped_{name}": count for name, count in stats["offload"]["dropped"].items() if count})
            causes.update(stats["failures"])
            causes.update({name: count for name, count in stats["not_stored"].items() if count and name != "exists"})
        return dict(causes)

    def _check(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        for rows in self._rows():
            if not bool((rows[:, slots] == tokens[None, :, None]).all()):
                raise RuntimeError("retrieve() gave wrong bytes")

    def _rows(self) -> list[torch.Tensor]:
        """Each layer as (K and V, tokens, 64-bit words)."""
        return [tensor.view(torch.int64).flatten(1, 2).flatten(2) for tensor in self._kv.tensors]


def whole(request: trace.Request) -> list[int]:
    """The ids that stand for whole chunks."""
    return request.hash_ids[: min(request.input_length // CHUNK, SIZE.chunks)]


def infinite(requests: Sequence[trace.Request]) -> list[int]:
    """Leading chunks of each request that were there before it."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        ids = whole(request)
        hits.append(next((place for place, id_ in enumerate(ids) if id_ not in seen), len(ids)))
        seen.update(ids)
    return hits
