"""The metadata server alone: latency of a lookup, keys a second from several clients, memory a chunk.

A real server process and real client processes; no GPU, no data. The references are the project's own floors (issue 1),
since no peer offers the same operation; the nearest figures of peers are in docs/benchmarks.md.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

from vcache_backend.config import ClientConfig
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import KEY_BYTES, ChunkKey
from vcache_backend.vram_pool import segment
from vcache_backend.vram_pool.devices import Device

from .results import Row, row

CHUNKS = 300_000
CHUNK_BYTES = 4096
BATCH = 512
SECONDS = 3.0
LOOKUPS = 20_000
PATIENT = ClientConfig(request_seconds=10.0, control_seconds=30.0, connect_seconds=5.0)


def run(clients: int = 4) -> list[Row]:
    """All server cases against one server that holds CHUNKS chunks; about 20 seconds."""
    with server() as path, Client(path, PATIENT) as client:
        empty = client.stats().rss_bytes
        _fill(client)
        per_chunk = (client.stats().rss_bytes - empty) / CHUNKS
        p50, p99, samples = _lookup_latency(client)
        looked_up = _together(clients, path, "lookup")
        put = _together(clients, path, "put")
    return [
        Row(
            "lookup_64_p50_us", p50, "us", 60.0, p50 / 60.0, samples, 0.0, "lookup of 64 keys over the socket", "<= 1", p50 <= 60
        ),
        Row("lookup_64_p99_us", p99, "us", 500.0, p99 / 500.0, samples, 0.0, "the same, 99th percentile", "<= 1", p99 <= 500),
        row("lookup_keys_per_s", "keys/s", looked_up, 1e6, what=f"{clients} clients, batches of {BATCH}", at_least=1),
        row(
            "put_keys_per_s",
            "keys/s",
            put,
            150e3,
            what=f"reserve + commit, full pool: each evicts; {clients} clients",
            at_least=1,
        ),
        row("server_bytes_per_chunk", "B", [per_chunk], 1024, what=f"resident memory, {CHUNKS:,} chunks", at_most=1),
    ]


@contextmanager
def server() -> Iterator[Path]:
    """A metadata server of its own, on a temporary socket, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vcache-bench-") as folder:
        path = Path(folder) / "vcache.sock"
        command = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the metadata server did not start ({process.poll()})")
                time.sleep(0.02)
            yield path
        finally:
            process.terminate()
            process.wait(10)


def key(number: int) -> ChunkKey:
    """The key of the number-th chunk of the benchmark: spread like a hash, the same in every process."""
    return ChunkKey((number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(KEY_BYTES, "big"))


def _fill(client: Client) -> None:
    host = Device("host", "host")
    with segment.create(host, CHUNKS * CHUNK_BYTES) as owned:
        client.add_segment(owned.info, owned.fd)
    for start in range(0, CHUNKS, BATCH):
        reserved = client.reserve([key(n) for n in range(start, min(start + BATCH, CHUNKS))], CHUNK_BYTES)
        client.commit(reserved.reservation)


def _lookup_latency(client: Client) -> tuple[float, float, int]:
    times = []
    for number in range(LOOKUPS):
        keys = [key(n) for n in range(number, number + 64)]
        started = time.perf_counter()
        found = client.lookup(keys)
        times.append((time.perf_counter() - started) * 1e6)
        assert found == 64
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100], len(times)


def _together(clients: int, path: Path, what: str) -> list[float]:
    """Keys a second of all clients together, three times over."""
    context = multiprocessing.get_context("spawn")
    rates = []
    for turn in range(3):
        barrier = context.Barrier(clients)
        results: multiprocessing.Queue[float] = context.Queue()
        work = [context.Process(target=_client, args=(path, what, turn, n, barrier, results)) for n in range(clients)]
        for process in work:
            process.start()
        rates.append(sum(results.get(timeout=120) for _ in work))
        for process in work:
            process.join(30)
    return rates


def _client(path: Path, what: str, turn: int, number: int, barrier: Barrier, results: multiprocessing.Queue[float]) -> None:
    """One client process: as many batches as it can in SECONDS."""
    with Client(path, PATIENT) as client:
        batches = _batches(turn, number, what)
        barrier.wait(60)
        started, done = time.perf_counter(), 0
        for keys in batches:
            if what == "lookup":
                done += client.lookup(keys)
            else:
                reserved = client.reserve(keys, CHUNK_BYTES)
                done += client.commit(reserved.reservation)
            if time.perf_counter() - started > SECONDS:
                break
        results.put(done / (time.perf_counter() - started))


def _batches(turn: int, number: int, what: str) -> list[list[ChunkKey]]:
    """Prepared beforehand, so that the clients' own work is not what is measured."""
    if what == "lookup":
        return [[key(n) for n in range(s, s + BATCH)] for s in range(0, CHUNKS - BATCH, BATCH)] * 40
    first = CHUNKS * (1 + turn * (os.cpu_count() or 1) * 4 + number * 3)
    return [[key(n) for n in range(s, s + BATCH)] for s in range(first, first + 2 * CHUNKS, BATCH)]
