"""Is nothing that was computed lost? Mooncake's conversation trace through two engines whose pool is too small by four times.

    python -m benchmarks.mooncake_trace [--trace FILE] [--requests N] [--policy write_through] [--pause 0.2]

Requests follow one another as fast as they can, on one engine and the other in turn: look up, retrieve, compute, store the rest. The
KV is tiny, 64 B a token, but every byte of it says which token it belongs to, and is checked. Hits are counted in chunks of 512 tokens,
one id of the trace, and compared with those of a cache that forgets nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vcache_backend.config import OffloadConfig
from vcache_backend.engine import VCacheEngine

from . import trace
from .mooncake_depot import missing
from .mooncake_site import BLOCK_SIZE, GIB, KV, SECONDS, Site, Size, load, threads, write_rows
from .results import Row, row

CHUNK = trace.BLOCK_TOKENS
TOO_SMALL = 4
MOST_BLOCKS = 1 << 13
SIZE = Size(layers=1, heads=1, dim=16, chunks=MOST_BLOCKS * BLOCK_SIZE // CHUNK, chunk_tokens=CHUNK)


def run(
    requests: Sequence[trace.Request] = (),
    policies: Sequence[str] = ("write_through",),
    pause: float = 0.0,
    through: bool = False,
) -> list[Row]:
    """One row a policy. Without requests, those of the excerpt. pause: seconds between requests, in which chunks are saved.

    through: wait after each request until its chunks are below. Else one that is evicted between its copy out of the pool and the end
    of its writing is nowhere for that long.
    """
    requests = requests or trace.excerpt()
    return [_row(requests, policy, pause, through) for policy in policies]


def _row(requests: Sequence[trace.Request], policy: str, pause: float, through: bool) -> Row:
    expected = infinite(requests)
    unique = len({id_ for request in requests for id_ in whole(request)})
    with Site(int(1.5 * unique * SIZE.chunk_bytes) + GIB // 16) as site, threads(1):
        replay = Replay(site, unique * SIZE.chunk_bytes // TOO_SMALL, site.depot.offload(policy=policy))
        for number, request in enumerate(requests):
            replay.one(number, request, expected[number], through)
            time.sleep(pause)
        causes = replay.causes()
    chunks = sum(len(whole(request)) for request in requests)
    what = f"{len(requests)} requests, {chunks} chunks, {unique} different, pool for {unique // TOO_SMALL}, {policy}, {pause:g} s apart"
    what = f"{what}; misses that an infinite cache has not: {json.dumps(causes)}; {load()}"
    case = "mooncake_trace_hit_rate" if policy == "write_through" else f"mooncake_trace_hit_rate_{policy}"
    return row(case, "hits", [sum(replay.hits) / chunks], sum(expected) / chunks, what=what, at_least=1.0)


class Replay:
    """Two engines of a node with one pool."""

    def __init__(self, site: Site, pool_bytes: int, offload: OffloadConfig) -> None:
        place, self._kv = site.node(), KV(SIZE)
        self._engines = [site.engine(place, self._kv, nbytes, offload) for nbytes in (pool_bytes // 2, pool_bytes // 2)]
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
            self._note(engine, tokens, found // CHUNK, hit)
        self.hits.append(hit)
        self._fill(tokens, slots)
        engine.store(tokens, got.logical_not(), self._kv.tensors, slots)
        engine.flush(SECONDS, through)

    def causes(self) -> dict[str, Any]:
        """Where the chunks were that ended a hit too early, and what both engines say went wrong."""
        causes: Counter[str] = Counter(self._lost)
        for engine in self._engines:
            stats = engine.get_stats()
            causes.update({f"dropped_{name}": count for name, count in stats["offload"]["dropped"].items() if count})
            causes.update(stats["failures"])
            causes.update({name: count for name, count in stats["not_stored"].items() if count and name != "exists"})
        return dict(causes)

    def _note(self, engine: VCacheEngine, tokens: torch.Tensor, found: int, hit: int) -> None:
        where = {0: "in the pool", 1: "below", -1: "nowhere"}[engine.contains(engine.keys(tokens)[hit])]
        when = "not found" if found <= hit else "found, not read"
        self._lost[f"{when}, now {where}"] += 1

    def _fill(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        for rows in self._rows():
            rows[:, slots] = tokens[None, :, None]

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


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if something was lost."""
    parser = argparse.ArgumentParser(prog="benchmarks.mooncake_trace", description=__doc__)
    parser.add_argument("--trace", type=Path, help="the whole trace (default: the excerpt in data/)")
    parser.add_argument("--requests", type=int, default=0, help="its first so many (default: all)")
    parser.add_argument("--policy", action="append", choices=["write_through"])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two requests (default: none)")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    if missing():
        console.print(f"nothing is measured: {missing()}")
        return 2
    requests = trace.read(options.trace.read_bytes()) if options.trace else trace.excerpt()
    with console.status("replaying the trace ..."):
        rows = run(requests[: options.requests or None], options.policy or ["write_through"], options.pause)
    return write_rows(rows, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
