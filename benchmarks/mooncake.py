"""The offload tier: what reading and writing through it costs, compared with Mooncake's own client,
and with no tier at all.

A real master and provider on this machine, over loopback TCP; nodes with a metadata server and a
pool each, on the GPU if there is one. Ours and the library's own calls take turns on the same
objects. Failures are tested by `benchmarks.soak --store`."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from vcache_backend.config import (
    ByteSize,
    Config,
    EngineConfig,
    OffloadConfig,
    PoolConfig,
    ServerConfig,
)
from vcache_backend.engine import VCacheEngine
from vcache_backend.metadata_server.client import Client
from vcache_backend.offload import objects

from .kv import GIB, KV, Size, prompt, threads, timed
from .mooncake_raw import WAYS
from .mooncake_store import Depot
from .processes import PATIENT, START_SECONDS, Child, metadata_server, module, until
from .results import Row, load, row

DEVICE = "cuda:0" if torch.cuda.is_available() else "host"
SECONDS = 60.0
DEAD_MICROSECONDS = 50
WARM_CALLS = 50
LARGE = Size()
"""16 chunks of 32 MiB."""
STEP = Size(chunks=2)
"""A prompt of 512 tokens."""
TINY = Size(layers=2, heads=2, dim=16, chunks=64)
"""64 chunks of 64 KiB, for what does not depend on bytes."""
SIDE, PRODUCTS = (900, 2) if DEVICE == "host" else (8192, 8)
"""The matrix products of a step, by size and number: 40 ms on one core; on a GPU as many operations
as 512 tokens of an 8B model.
"""


class Site:
    """A store, nodes with a metadata server each, engines on them. Everything ends with the
    context.
    """

    def __init__(self, *providers: int, **flags: Any) -> None:
        """providers: bytes that each one lends. flags: the master's own."""
        with ExitStack() as undo:
            self.folder = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-bench-"))
            )
            self.depot = undo.enter_context(Depot(self.folder, providers, **flags))
            self._undo = undo.pop_all()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def node(self) -> Path:
        """A metadata server's socket."""
        return self._undo.enter_context(metadata_server())

    def raw(self, nbytes: int) -> Child:
        """Mooncake's own client, with so much memory for objects."""
        command = module("benchmarks.mooncake_raw", self.depot.master.address, str(nbytes))
        child = self._undo.enter_context(Child("raw client", command, self.folder / "raw.log"))
        child.answer(START_SECONDS)
        return child

    def engine(
        self, node: Path, kv: KV, pool_bytes: int, offload: OffloadConfig | None
    ) -> VCacheEngine:
        """With an open offload tier, or none."""
        config = Config(
            server=ServerConfig(socket=str(node)),
            client=PATIENT,
            pool=PoolConfig(device=kv.device, segment_bytes=ByteSize(pool_bytes)),
            engine=EngineConfig(chunk_size=kv.size.chunk_tokens),
            offload=offload or OffloadConfig(),
        )
        made = self._undo.enter_context(VCacheEngine(config, kv.layout))
        made.register(kv.tensors)
        if offload is not None and not until(
            lambda: made.get_stats()["offload"]["usable"], SECONDS
        ):
            raise RuntimeError(f"no offload tier: {made.get_stats()}")
        return made


def run() -> list[Row]:
    """All rows; about ten minutes."""
    with threads(1):
        return [
            get_row(),
            put_row(),
            *lookup_rows(),
            *step_rows(),
        ]


def _against_library(
    case: str, size: Size, ours: list[float], theirs: list[dict[str, float]], what: str
) -> Row:
    """The row for our seconds against those of each of the library's ways, of which the best
    counts. The first turn is left out: it connects and compiles."""
    speeds = {way: [size.nbytes / turn[way] / 1e9 for turn in theirs[1:]] for way in WAYS}
    best = max(speeds, key=lambda way: statistics.median(speeds[way]))
    ways = ", ".join(f"{way} {statistics.median(samples):.2f}" for way, samples in speeds.items())
    what = (
        f"{what} {size.chunks} chunks of {size.chunk_bytes / (1 << 20):g} MiB; the "
        f"library's ways, GB/s: {ways}; {load()}"
    )
    return row(
        case,
        "GB/s",
        [size.nbytes / seconds / 1e9 for seconds in ours[1:]],
        speeds[best],
        what=what,
        at_least=0.9,
    )


def get_row(size: Size = LARGE, runs: int = 9) -> Row:
    """retrieve() of chunks that only the store has, without promotion into the pool."""
    ours, theirs = [], []
    with Site(2 * size.nbytes + GIB // 4) as site:
        kv, into, tokens = KV(size, 0, DEVICE), KV(size, 1, DEVICE), prompt(size.tokens)
        with site.engine(site.node(), kv, size.nbytes + GIB // 8, site.depot.offload()) as writer:
            writer.store(tokens, None, kv.tensors, kv.slots)
            if not writer.flush(SECONDS, through=True):
                raise RuntimeError(f"not written: {writer.get_stats()}")
        place, offload = (
            site.node(),
            site.depot.offload(promote=False, lookup_seconds=1.0),
        )
        reader = site.engine(place, into, size.nbytes + GIB // 8, offload)
        keys, object_bytes = reader.keys(tokens), objects.HEADER_BYTES + size.chunk_bytes
        raw, names = site.raw(size.chunks * object_bytes), [objects.name(key) for key in keys]
        with Client(place, PATIENT) as client:
            for _ in range(runs + 1):
                client.remove(keys)
                into.poison()
                if reader.lookup(tokens) != size.tokens:
                    raise RuntimeError(f"not everything is in the store: {reader.get_stats()}")
                ours.append(timed(lambda: reader.retrieve(tokens, None, into.tensors, into.slots)))
                reader.flush(SECONDS, through=True)
                if not into.holds(kv):
                    raise RuntimeError(
                        f"retrieve() did not bring the bytes that were stored: {reader.get_stats()}"
                    )
                theirs.append(
                    {way: raw.ask("get", names=names, size=object_bytes, way=way) for way in WAYS}
                )
    what = "retrieve() out of the store, not stored in the pool again:"
    return _against_library("mooncake_get_512MiB", size, ours, theirs, what)


def put_row(size: Size = LARGE, runs: int = 9) -> Row:
    """store(), until all of it is in the Mooncake store."""
    ours, theirs = [], list[dict[str, float]]()
    object_bytes = objects.HEADER_BYTES + size.chunk_bytes
    with Site(3 * size.nbytes + GIB // 4) as site:
        kv = KV(size, 0, DEVICE)
        writer = site.engine(
            site.node(), kv, size.nbytes + size.nbytes // 4 + GIB // 8, site.depot.offload()
        )
        raw = site.raw(size.chunks * object_bytes)
        _touch(raw, size, object_bytes, 3)
        for turn in range(runs + 1):
            tokens = prompt(size.tokens)

            def write(tokens: torch.Tensor = tokens) -> None:
                writer.store(tokens, None, kv.tensors, kv.slots)
                writer.flush(SECONDS, through=True)

            ours.append(timed(write))
            if (written := writer.get_stats()["offload"]["written"]) != (turn + 1) * size.chunks:
                raise RuntimeError(f"{written} chunks written: {writer.get_stats()}")
            names = [objects.name(key) for key in writer.keys(tokens)]
            raw.ask("remove", names=names)
            theirs.append({})
            for way in WAYS:
                theirs[-1][way] = raw.ask("put", names=names, size=object_bytes, way=way)
                raw.ask("remove", names=names)
    what = "store() until all is in the store; reference: batch_put_from;"
    return _against_library("mooncake_put_512MiB", size, ours, theirs, what)


def _touch(raw: Child, size: Size, object_bytes: int, times: int) -> None:
    """Write so many times `size` of the provider's memory once before measuring: a page's first
    write takes six times as long.
    """
    names = [[f"touch {turn} {index}" for index in range(size.chunks)] for turn in range(times)]
    for some in names:
        raw.ask("put", names=some, size=object_bytes, way="one call")
    for some in names:
        raw.ask("remove", names=some)


# ---- what the offload tier costs where it is not needed


def lookup_rows(calls: int = 2000, size: Size = TINY) -> list[Row]:
    """lookup() of chunks that are all in the pool; and, with a dead master, of a prompt that nobody
    has.
    """
    with Site(GIB // 4) as site:
        kv, place, tokens, unknown = KV(size), site.node(), prompt(size.tokens), prompt(size.tokens)
        on = site.engine(place, kv, 2 * size.nbytes + (1 << 20), site.depot.offload())
        off = site.engine(place, kv, 0, None)
        on.store(tokens, None, kv.tensors, kv.slots)
        on.flush(SECONDS, through=True)
        there = _lookups(on, off, tokens, calls)
        site.depot.master.kill()
        if not until(
            lambda: on.lookup(unknown) == 0 and not on.get_stats()["offload"]["usable"], SECONDS
        ):
            raise RuntimeError(f"the master's end was not noticed: {on.get_stats()}")
        dead = _lookups(on, off, unknown, calls)
    what = (
        f"lookup() of {size.chunks} chunks, all in the pool; reference: no offload tier; {load()}"
    )
    one = row("mooncake_lookup_on_off", "us", *there, what=what, at_most=1.05)
    what = (
        f"lookup() of {size.chunks} chunks that nobody has, the master dead; reference: no "
        f"offload tier; {load()}"
    )
    other = row("mooncake_lookup_dead_master", "us", *dead, what=what)
    ok = other.value <= other.reference + DEAD_MICROSECONDS
    return [one, msgspec.structs.replace(other, limit=f"<= +{DEAD_MICROSECONDS} us", ok=ok)]


def _lookups(
    on: VCacheEngine, off: VCacheEngine, tokens: torch.Tensor, calls: int
) -> tuple[list[float], list[float]]:
    """Microseconds of each call of one engine and the other, in turns."""
    samples: dict[VCacheEngine, list[float]] = {on: [], off: []}
    for turn in range(calls + WARM_CALLS):
        for engine in (on, off) if turn % 2 else (off, on):
            seconds = timed(lambda engine=engine: engine.lookup(tokens))  # type: ignore[misc]
            if turn >= WARM_CALLS:
                samples[engine].append(seconds * 1e6)
    return samples[on], samples[off]


def step_rows(steps: int = 60, size: Size = STEP, side: int = SIDE) -> list[Row]:
    """A step that stores two chunks and multiplies matrices, on one core or the GPU: times of
    store() alone and of the whole step.
    """
    with Site(GIB) as site, threads(1):
        kv, place = KV(size, 0, DEVICE), site.node()
        on = site.engine(place, kv, 16 * size.nbytes, site.depot.offload())
        off = site.engine(place, kv, 0, None)
        left = torch.randn(
            side,
            side,
            device=kv.tensors[0].device,
            dtype=torch.float32 if DEVICE == "host" else torch.bfloat16,
        )
        samples: dict[VCacheEngine, list[tuple[float, float]]] = {on: [], off: []}
        for turn in range(steps + 3):
            for engine in (on, off) if turn % 2 else (off, on):
                tokens, started = prompt(size.tokens), time.perf_counter()
                engine.store(tokens, None, kv.tensors, kv.slots)
                stored = time.perf_counter()
                for _ in range(PRODUCTS):
                    left @ left
                if left.is_cuda:
                    torch.cuda.synchronize()
                done = time.perf_counter()
                engine.flush(SECONDS, through=True)
                samples[engine].append((1e3 * (stored - started), 1e3 * (done - started)))
    stores, whole = (
        [[pair[part] for pair in samples[engine][3:]] for engine in (on, off)] for part in (0, 1)
    )
    said = f"{size.nbytes >> 20} MiB stored; reference: no offload tier; {load()}"
    return [
        row(
            "mooncake_step_overhead",
            "ms",
            *whole,
            what=f"store() and matrix products; {said}",
            at_most=1.01,
        ),
        row("mooncake_store_call", "ms", *stores, what=f"store() alone; {said}", at_most=1.01),
    ]
