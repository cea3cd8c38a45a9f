"""The metadata server alone: latency of a look-up, keys per second from several clients, memory per
chunk.

A real server process and real client processes; no GPU, no data. The references are the project's
own floors (issue 1), since no peer offers the same operation; the nearest figures of peers are in
docs/benchmarks.md."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey
from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.devices import Device

from .processes import PATIENT, metadata_server
from .results import Row, percentile, row

CHUNKS = 300_000
CHUNK_BYTES = 4096
BATCH = 512
SECONDS, PREPARE_SECONDS = 3.0, 4.0
LOOKUPS = 20_000


def run(clients: int = 4) -> list[Row]:
    """All server cases against one server that holds CHUNKS chunks; about 20 seconds."""
    with metadata_server() as path, Client(path, PATIENT) as client:
        empty = client.stats().rss_bytes
        with regions.create(Device("host", "host"), CHUNKS * CHUNK_BYTES) as owned:
            os.close(client.add_segment(owned.info, owned.fd)[1])
        store(client, CHUNKS)
        per_chunk = (client.stats().rss_bytes - empty) / CHUNKS
        times = _lookup_times(client)
        looked_up, put = _together(clients, path, "lookup"), _together(clients, path, "put")
    batches = f"{clients} clients, batches of {BATCH}"
    resident = f"resident memory, {CHUNKS:,} chunks"
    evicting = f"reserve + commit, full pool: each evicts; {clients} clients"
    return [
        _judged("lookup_64_p50_us", times, 50, 60.0),
        _judged("lookup_64_p99_us", times, 99, 500.0),
        row("lookup_keys_per_s", "keys/s", looked_up, 1e6, what=batches, at_least=1),
        row("put_keys_per_s", "keys/s", put, 150e3, what=evicting, at_least=1),
        row("server_bytes_per_chunk", "B", per_chunk, 1024, what=resident, at_most=1),
    ]


def _judged(case: str, times: list[float], which: int, most: float) -> Row:
    value, what, runs = percentile(times, which), f"p{which}, 64 keys", len(times)
    return row(case, "us", value, most, what=what, at_most=1, runs=runs)


def key(number: int) -> ChunkKey:
    """The key of the number-th chunk of the benchmark: spread like a hash, the same in every
    process.
    """
    spread = number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
    return ChunkKey(spread.to_bytes(KEY_BYTES, "big"))


def store(client: Client, chunks: int) -> None:
    """Store so many chunks, each in a slot."""
    for start in range(0, chunks, BATCH):
        keys = [key(n) for n in range(start, min(start + BATCH, chunks))]
        reserved = client.reserve(keys, CHUNK_BYTES)
        client.commit(reserved.reservation)


def _lookup_times(client: Client) -> list[float]:
    """Microseconds."""
    times = []
    for number in range(LOOKUPS):
        keys = [key(n) for n in range(number, number + 64)]
        started = time.perf_counter()
        found = client.lookup(keys)
        times.append((time.perf_counter() - started) * 1e6)
        assert found == 64
    return times


def _together(clients: int, path: Path, what: str) -> list[float]:
    """Keys per second of all clients together; three samples."""
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as processes:
        # Each process has to be there before the first sample begins.
        list(processes.map(time.sleep, [1.0] * clients))
        rates = []
        for turn in range(3):
            client = partial(_client, path, what, turn, time.monotonic() + PREPARE_SECONDS)
            rates.append(sum(processes.map(client, range(clients))))
        return rates


def _client(path: Path, what: str, turn: int, begin: float, number: int) -> float:
    """One client process: as many batches as it can in SECONDS from the time `begin` on. Keys per
    second.
    """
    with Client(path, PATIENT) as client:
        batches, done = _batches(turn, number, what), 0
        time.sleep(max(0.0, begin - time.monotonic()))
        started = time.perf_counter()
        for keys in batches:
            if what == "lookup":
                done += client.lookup(keys)
            else:
                reserved = client.reserve(keys, CHUNK_BYTES)
                done += client.commit(reserved.reservation)
            if time.perf_counter() - started > SECONDS:
                break
        return done / (time.perf_counter() - started)


def _batches(turn: int, number: int, what: str) -> list[list[ChunkKey]]:
    """Batches of keys, made beforehand so that the clients' own work is not measured."""
    if what == "lookup":
        return [[key(n) for n in range(s, s + BATCH)] for s in range(0, CHUNKS - BATCH, BATCH)] * 40
    first = CHUNKS * (1 + turn * (os.cpu_count() or 1) * 4 + number * 3)
    return [[key(n) for n in range(s, s + BATCH)] for s in range(first, first + 2 * CHUNKS, BATCH)]
