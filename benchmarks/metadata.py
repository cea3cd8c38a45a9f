"""The metadata server alone: latency of a look-up in the pool and in place, keys per second from
several clients, memory per chunk and per block.

A real server process and real client processes; no GPU, no data. The references are the project's
own floors, since no peer offers the same operation."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.generations import Generations

from .processes import PATIENT, metadata_server
from .results import Row, percentile, row

CHUNKS = 300_000
CHUNK_BYTES = 4096
BATCH = 512
SECONDS, PREPARE_SECONDS = 3.0, 4.0
LOOKUPS = 20_000
NAMESPACE = b"measured"
BLOCKS, RUN, EACH, ASKED = 1 << 16, 512, 16, 1024
"""Of an instance that shares in place: blocks, blocks of a run (a step's), hashes of a chunk, and
of a prompt of 16,384 tokens."""


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
    per_block, in_place = _in_place()
    batches = f"{clients} clients, batches of {BATCH}"
    resident = f"resident memory, {CHUNKS:,} chunks"
    published = f"resident memory, {BLOCKS:,} blocks in place in runs of {RUN}"
    evicting = f"reserve + commit, full pool: each evicts; {clients} clients"
    return [
        _judged("lookup_64_p50_us", times, 50, 60.0),
        _judged("lookup_64_p99_us", times, 99, 500.0),
        _judged("lookup_16k_in_place_p50_us", in_place, 50, 100.0, "1,024 hashes, 64 chunks"),
        row("lookup_keys_per_s", "keys/s", looked_up, 1e6, what=batches, at_least=1),
        row("put_keys_per_s", "keys/s", put, 150e3, what=evicting, at_least=1),
        row("server_bytes_per_chunk", "B", per_chunk, 1024, what=resident, at_most=1),
        row("server_bytes_per_block", "B", per_block, 300, what=published, at_most=1),
    ]


def _judged(case: str, times: list[float], which: int, most: float, asked: str = "64 keys") -> Row:
    value, what, runs = percentile(times, which), f"p{which}, {asked}", len(times)
    return row(case, "us", value, most, what=what, at_most=1, runs=runs)


def key(number: int) -> ChunkKey:
    """The key of the number-th chunk of the benchmark: spread like a hash, the same in every
    process.
    """
    spread = number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
    return ChunkKey(NAMESPACE + spread.to_bytes(m.HASH_BYTES, "big") + bytes(m.RANK_BYTES))


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


def _in_place() -> tuple[float, list[float]]:
    """Bytes of the server's memory for a block of an instance, and microseconds of a look-up."""
    instance, blocks = m.InstanceId(bytes(m.INSTANCE_BYTES)), np.random.default_rng(7)
    numbers = blocks.permutation(BLOCKS).astype("<u4")
    hashes = b"".join([key(n)[m.NAMESPACE_BYTES : -m.RANK_BYTES] for n in range(BLOCKS)])
    kinds, nbytes = [m.LayerKind(1, 1, 64, 64)], 64 * BLOCKS
    shape = m.CacheShape("host", "host", "", kinds, BLOCKS, 16, [0], nbytes)
    with metadata_server() as path, Client(path, PATIENT) as client, ExitStack() as undo:
        empty = client.stats().rss_bytes
        table = Generations(instance, BLOCKS)
        undo.callback(table.close)
        memory = undo.enter_context(regions.create(Device("host", "host"), nbytes))
        join = m.Join(instance, NAMESPACE, BLOCKS, 1, EACH, [m.BlockTable("full")])
        client.join(join, table.fd)
        client.show_cache(instance, 0, shape, memory.fd)
        runs = list[m.BlockRun]()
        for first in range(0, BLOCKS, RUN):
            part = numbers[first : first + RUN]
            size = m.HASH_BYTES
            packed = part.tobytes(), table.counters[part].tobytes()
            some = hashes[first * size : (first + RUN) * size]
            runs.append(m.BlockRun(first, *packed, 0, some))
        assert client.publish(m.Publish(instance, 0, runs)) == BLOCKS
        per_block = (client.stats().rss_bytes - empty) / BLOCKS
        times = []
        for number in range(LOOKUPS):
            first = number % (BLOCKS // ASKED - 1) * ASKED * m.HASH_BYTES
            asked = hashes[first : first + ASKED * m.HASH_BYTES]
            question = m.Find(NAMESPACE, asked, EACH, ASKED)
            started = time.perf_counter()
            found = client.find(question)
            times.append((time.perf_counter() - started) * 1e6)
            assert found.end == ASKED
    return per_block, times


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
