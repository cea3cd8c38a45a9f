"""The offload tier: what reading and writing through it costs against Mooncake's own client, and against none at all.

A real master and provider on this machine, over loopback TCP; two nodes, each with a metadata server and a pool, on the GPU if there is
one. What is measured against the library alone is measured in turns with it, on the same objects. Failures: `benchmarks.soak --store`.
"""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from vcache_backend.engine import VCacheEngine
from vcache_backend.metadata_server.client import Client
from vcache_backend.offload import objects

from . import mooncake_trace
from .mooncake_raw import WAYS
from .mooncake_site import DEVICE, GIB, KV, SECONDS, Site, Size, prompt, synchronize, threads, timed, until
from .processes import PATIENT, Child
from .results import Row, load, row

DEAD_MICROSECONDS = 50
WARM_CALLS = 50
LARGE = Size()
"""16 chunks of 32 MiB."""
SMALL = Size(layers=8, chunks=64)
"""64 chunks of 8 MiB."""
STEP = Size(chunks=2)
"""A prompt of 512 tokens."""
TINY = Size(layers=2, heads=2, dim=16, chunks=64)
"""64 chunks of 64 KiB, for what does not depend on bytes."""
SIDE, PRODUCTS = (900, 2) if DEVICE == "host" else (8192, 8)
"""The matrices of a step: 40 ms on one core; on a GPU as many operations as 512 tokens of an 8B model take."""
LATER_STEPS, LAUNCHES = 8, 1000


def run() -> list[Row]:
    """All rows; about ten minutes."""
    with threads(1):
        rows = [*get_rows(), *put_rows(), *lookup_rows(), *step_rows()]
    return [*rows, mooncake_trace.run()]


class Turns:
    """Samples of ours and of every way of the library's, in turns. Its best way counts."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.ours: list[float] = []
        self._theirs: dict[str, list[float]] = {way: [] for way in WAYS}

    def add(self, ours: float, theirs: dict[str, float]) -> None:
        """Seconds of one turn."""
        self.ours.append(self._nbytes / ours / 1e9)
        for way, seconds in theirs.items():
            self._theirs[way].append(self._nbytes / seconds / 1e9)

    def row(self, case: str, what: str) -> Row:
        best = max(self._theirs, key=lambda way: statistics.median(self._theirs[way]))
        ways = ", ".join(f"{way} {statistics.median(samples):.2f}" for way, samples in self._theirs.items())
        what = f"{what}; the library's ways, GB/s: {ways}; {load()}"
        return row(case, "GB/s", self.ours, self._theirs[best], what=what, at_least=0.9)


# ---- reading


def get_rows(runs: int = 9, large: Size = LARGE, small: Size = SMALL) -> list[Row]:
    """retrieve() of what lies only below. With promotion it is stored in the pool again, too, which the library does not do."""
    return [
        get_row("mooncake_get_512MiB", large, runs, promote=False),
        get_row("mooncake_get_512MiB_promoting", large, runs, promote=True),
        get_row("mooncake_get_512MiB_small_chunks", small, runs, promote=False),
    ]


def get_row(case: str, size: Size, runs: int, promote: bool) -> Row:
    turns = Turns(size.nbytes)
    with Site(2 * size.nbytes + GIB // 4) as site:
        kv, into, tokens = KV(size, 0, DEVICE), KV(size, 1, DEVICE), prompt(size.tokens)
        with site.engine(site.node(), kv, size.nbytes + GIB // 8, site.depot.offload()) as writer:
            writer.store(tokens, None, kv.tensors, kv.slots)
            if not writer.flush(SECONDS, through=True):
                raise RuntimeError(f"not written: {writer.get_stats()}")
        place = site.node()
        reader = site.engine(
            place, into, size.nbytes + GIB // 8, site.depot.offload(promote=promote, negative_seconds=0.0, lookup_seconds=1.0)
        )
        keys = reader.keys(tokens)
        object_bytes = objects.HEADER_BYTES + size.chunk_bytes
        raw, names = site.raw(size.chunks * object_bytes), [objects.name(key) for key in keys]
        with Client(place, PATIENT) as client:
            for turn in range(runs + 1):
                client.remove(keys)
                into.poison()
                if reader.lookup(tokens) != size.tokens:
                    raise RuntimeError(f"not everything is below: {reader.get_stats()}")
                ours = timed(lambda: reader.retrieve(tokens, None, into.tensors, into.slots))
                reader.flush(SECONDS, through=True)
                if not into.holds(kv):
                    raise RuntimeError(f"retrieve() did not bring the bytes that were stored: {reader.get_stats()}")
                theirs = {way: raw.ask("get", names=names, size=object_bytes, way=way) for way in WAYS}
                # The first one makes connections and compiles.
                if turn:
                    turns.add(ours, theirs)
    stored = "stored in the pool again" if promote else "not stored in the pool again"
    return turns.row(case, f"retrieve() of {size.chunks} chunks of {size.chunk_bytes / (1 << 20):g} MiB from below, {stored}")


# ---- writing


def put_rows(runs: int = 9, large: Size = LARGE, small: Size = SMALL) -> list[Row]:
    """store(), and all of it below."""
    return [put_row("mooncake_put_512MiB", large, runs), put_row("mooncake_put_512MiB_small_chunks", small, runs)]


def put_row(case: str, size: Size, runs: int) -> Row:
    turns = Turns(size.nbytes)
    object_bytes = objects.HEADER_BYTES + size.chunk_bytes
    with Site(3 * size.nbytes + GIB // 4) as site:
        kv = KV(size, 0, DEVICE)
        writer = site.engine(site.node(), kv, size.nbytes + size.nbytes // 4 + GIB // 8, site.depot.offload())
        raw = site.raw(size.chunks * object_bytes)
        _touch(raw, size, object_bytes, 3)
        for turn in range(runs + 1):
            tokens = prompt(size.tokens)

            def write(tokens: torch.Tensor = tokens) -> None:
                writer.store(tokens, None, kv.tensors, kv.slots)
                writer.flush(SECONDS, through=True)

            ours, theirs = timed(write), {}
            written = writer.get_stats()["offload"]["written"]
            if written != (turn + 1) * size.chunks:
                raise RuntimeError(f"{written} chunks written: {writer.get_stats()}")
            names = [objects.name(key) for key in writer.keys(tokens)]
            raw.ask("remove", names=names)
            for way in WAYS:
                theirs[way] = raw.ask("put", names=names, size=object_bytes, way=way)
                raw.ask("remove", names=names)
            if turn:
                turns.add(ours, theirs)
    what = (
        f"store() of {size.chunks} chunks of {size.chunk_bytes / (1 << 20):g} MiB until they are below; reference: batch_put_from"
    )
    return turns.row(case, what)


def _touch(raw: Child, size: Size, object_bytes: int, times: int) -> None:
    """Write so many times `size` of the provider's memory once: a page that nobody has written before takes six times as long."""
    names = [[f"touch {turn} {index}" for index in range(size.chunks)] for turn in range(times)]
    for some in names:
        raw.ask("put", names=some, size=object_bytes, way="one call")
    for some in names:
        raw.ask("remove", names=some)


# ---- what the tier costs where it is not needed


def lookup_rows(calls: int = 2000, size: Size = TINY) -> list[Row]:
    """lookup() of chunks that are all in the pool; and, with a dead master, of a prompt that nobody has."""
    with Site(GIB // 4) as site:
        kv, place, tokens = KV(size), site.node(), prompt(size.tokens)
        on = site.engine(place, kv, 2 * size.nbytes + (1 << 20), site.depot.offload())
        off = site.engine(place, kv, 0, None)
        on.store(tokens, None, kv.tensors, kv.slots)
        on.flush(SECONDS, through=True)
        there = _lookups(on, off, tokens, calls)
        site.depot.master.kill()
        unknown = prompt(size.tokens)
        until(lambda: on.lookup(unknown) == 0 and not on.get_stats()["offload"]["usable"])
        dead = _lookups(on, off, unknown, calls)
    what = f"lookup() of {size.chunks} chunks, all in the pool; reference: no tier; {load()}"
    rows = [row("mooncake_lookup_on_off", "us", *there, what=what, at_most=1.05)]
    what = f"lookup() of {size.chunks} chunks that nobody has, the master dead; reference: no tier; {load()}"
    one = row("mooncake_lookup_dead_master", "us", *dead, what=what)
    return [
        *rows,
        msgspec.structs.replace(one, limit=f"<= +{DEAD_MICROSECONDS} us", ok=one.value <= one.reference + DEAD_MICROSECONDS),
    ]


def _lookups(on: VCacheEngine, off: VCacheEngine, tokens: torch.Tensor, calls: int) -> tuple[list[float], list[float]]:
    """Microseconds of each call of one engine and the other, in turns."""
    samples: dict[VCacheEngine, list[float]] = {on: [], off: []}
    for turn in range(calls + WARM_CALLS):
        for engine in (on, off) if turn % 2 else (off, on):
            seconds = timed(lambda engine=engine: engine.lookup(tokens))  # type: ignore[misc]
            if turn >= WARM_CALLS:
                samples[engine].append(seconds * 1e6)
    return samples[on], samples[off]


def step_rows(steps: int = 60, size: Size = STEP, side: int = SIDE) -> list[Row]:
    """A step that stores two chunks and multiplies matrices, on one core or the GPU: store() alone, and all of it. Then the steps that
    follow, in which the chunks are written."""
    with Site(GIB) as site, threads(1):
        kv, place = KV(size, 0, DEVICE), site.node()
        on = site.engine(place, kv, 16 * size.nbytes, site.depot.offload())
        off = site.engine(place, kv, 0, None)
        left = torch.randn(side, side, device=kv.tensors[0].device, dtype=torch.float32 if DEVICE == "host" else torch.bfloat16)
        small = left[0].clone()
        stores, whole, later = (_both(on, off) for _ in range(3))

        def step(engine: VCacheEngine) -> tuple[float, float, float]:
            tokens = prompt(size.tokens)
            started = time.perf_counter()
            engine.store(tokens, None, kv.tensors, kv.slots)
            stored = time.perf_counter()
            for _ in range(PRODUCTS):
                left @ left
            synchronize()
            done = time.perf_counter()
            for _ in range(LATER_STEPS):
                for _ in range(LAUNCHES):
                    small.add_(1.0)
                synchronize()
            return stored - started, done - started, time.perf_counter() - done

        for turn in range(steps + 3):
            for engine in (on, off) if turn % 2 else (off, on):
                times = step(engine)
                engine.flush(SECONDS, through=True)
                if turn >= 3:
                    for samples, seconds in zip((stores, whole, later), times, strict=True):
                        samples[engine].append(seconds * 1e3)
    said = f"{size.nbytes >> 20} MiB stored; reference: no tier; {load()}"
    follow = f"{LATER_STEPS} steps of {LAUNCHES} small operations each, from Python, while they are written; {said}"
    return [
        row("mooncake_step_overhead", "ms", whole[on], whole[off], what=f"store() and matrix products; {said}", at_most=1.01),
        row("mooncake_store_call", "ms", stores[on], stores[off], what=f"store() alone; {said}", at_most=1.01),
        row("mooncake_steps_after", "ms", later[on], later[off], what=follow),
    ]


def _both(on: VCacheEngine, off: VCacheEngine) -> dict[VCacheEngine, list[float]]:
    return {on: [], off: []}
