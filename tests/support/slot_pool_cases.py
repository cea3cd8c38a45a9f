"""The pool among real processes: a server that dies at a store to a table, writers and readers.

The bytes of a chunk follow from its key, so each reader can tell right bytes from wrong ones. It
counts what it believed and what it did not, in memory that all processes share."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from model import chunk_key
from processes import QUICK, info

from vcache_backend.config import ServerConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import slots
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.main import Server
from vcache_backend.metadata_server.slots import SlotsTable
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool.generations import GenerationView

CHUNK = 16384
KEYS = [chunk_key(number) for number in range(160)]
SEGMENTS = {f"s{number}": 48 * CHUNK for number in range(2)}
WRITE_SECONDS, PIN_SECONDS = 0.05, 0.002
COUNTS = ("believed", "refused", "caught", "wrong", "stored", "late")
"""Chunks: right ones that a reader believed, those that it did not, how many of these were wrong,
wrong ones that it believed; committed, and committed too late or by nobody's leave."""
CONTENTS = {
    key: np.arange(CHUNK // 8, dtype=np.uint64) + np.uint64((number + 1) << 32)
    for number, key in enumerate(KEYS)
}
OFTEN = msgspec.structs.replace(QUICK, heartbeat_seconds=0.05, retry_seconds=0.01)


class Counts:
    """Sums by process: each has a row of its own."""

    def __init__(self, fd: int, row: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._all = np.frombuffer(self._memory, dtype=np.uint64).reshape(-1, 8)
        self._row = self._all[row]

    def add(self, name: str, number: int = 1) -> None:
        self._row[COUNTS.index(name)] += np.uint64(number)

    def sums(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._all.sum(axis=0).tolist(), strict=False))


# ---- the server


class Suicidal:
    """Stores of a server that is killed at one of them, now and then."""

    def __init__(self, view: Any, odds: float) -> None:
        self._view, self._odds = view, odds

    def __getitem__(self, at: Any) -> Any:
        return self._view[at]

    def __setitem__(self, at: int, value: int) -> None:
        for store in (False, True):
            if random.random() < self._odds:
                os.kill(os.getpid(), signal.SIGKILL)
            if not store:
                self._view[at] = value


def serve(path: str, odds: float, control: str) -> None:
    """A server, in a process of its own. odds: of its death at a store. control: what it leaves
    out."""
    slots.SLABS_WANTED = 4
    made = SlotsTable.__init__

    def dies(table: SlotsTable, *given: Any) -> None:
        made(table, *given)
        table.words, table.generations = (
            Suicidal(view, odds) for view in (table.words, table.generations)
        )

    def free_at_once(directory: Directory, number: int) -> None:
        for place in directory._shut(number).places.values():
            region, slot = directory._at(place)
            region.table.free(slot)
            region.give(slot)

    if odds:
        SlotsTable.__init__ = dies  # type: ignore[method-assign]
    if control == "quarantine":
        Directory._quarantine = free_at_once  # type: ignore[method-assign]
    for name in (path, path + ".lock"):
        with suppress(FileNotFoundError):
            os.unlink(name)
    Server(ServerConfig(socket=path, reservation_seconds=WRITE_SECONDS)).run()


# ---- clients


def connected(path: str, memory: dict[str, int], tables: dict[str, int]) -> Client:
    """A client that shows the tables to each new server. tables: filled if it is empty."""
    client = Client(Path(path), OFTEN)

    def offer(listed: list[m.SegmentInfo]) -> None:
        for name in SEGMENTS.keys() - {segment.id for segment in listed}:
            with suppress(VCacheError):
                segment = info(name, SEGMENTS[name])
                _, table = client.add_segment(segment, memory[name], tables.get(name))
                if tables.setdefault(name, table) != table:
                    os.close(table)

    client.on_segments = offer
    client.on_return.append(lambda: offer(client.list_segments()))
    with suppress(VCacheError):
        offer(client.list_segments())
    return client


def prefix(chance: random.Random) -> list[m.ChunkKey]:
    """Some are asked for more often."""
    start = int(len(KEYS) * chance.random() ** 2) // 4 * 4
    return KEYS[start : start + 4]


def write(client: Client, maps: dict[str, mmap.mmap], counts: Counts, seed: int) -> None:
    """Store prefixes, slowly. Pauses at times, longer than the server waits."""
    chance = random.Random(seed)
    while True:
        keys = prefix(chance)
        try:
            reserved = client.reserve(keys, CHUNK)
        except VCacheError:
            reserved = m.Reserved(0, 0.0, [])
        if not reserved.reservation:
            time.sleep(0.001)
            continue
        for key, slot in zip(keys, reserved.slots, strict=True):
            if isinstance(slot, int):
                continue
            target = np.frombuffer(maps[slot.segment], np.uint64, CHUNK // 8, slot.offset)
            data = CONTENTS[key]
            for part in range(0, len(data), 512):
                target[part : part + 512] = data[part : part + 512]
                if chance.random() < 0.01:
                    time.sleep(chance.choice([0.0005, 0.01, 3 * WRITE_SECONDS]))
        done = 0
        while client.connected or not done:
            with suppress(VCacheError):  # a server that starts again hears of it, too
                done = client.commit(reserved.reservation)
                break
            time.sleep(0.005)
        counts.add("stored" if done else "late", done or 1)


def read(
    client: Client,
    maps: dict[str, mmap.mmap],
    views: dict[str, GenerationView],
    counts: Counts,
    seed: int,
    check: bool,
) -> None:
    """Copy prefixes, slowly at times, and compare what is believed. check: ask the generations."""
    chance = random.Random(seed)
    while True:
        keys, runs = prefix(chance), list[m.SlotRun]()
        with suppress(VCacheError):
            runs = client.pin(keys, PIN_SECONDS).runs
        for run in runs:
            copies = []
            for slot in np.frombuffer(run.slots, np.uint32).tolist():
                at = run.offset + (slot - run.base) * run.slot_bytes
                source = np.frombuffer(maps[run.segment], np.uint64, CHUNK // 8, at)
                copy = np.empty(CHUNK // 8, np.uint64)
                copy[:1000] = source[:1000]
                if chance.random() < 0.3:
                    time.sleep(chance.choice([0.0002, 0.005, 0.05]))
                copy[1000:] = source[1000:]
                copies.append(copy)
            view, right = views[run.segment], run.chunks
            if check:
                right = view.leading(run.slots, run.generations, 1)
            mine = keys[run.first : run.stop]
            for number, (key, copy) in enumerate(zip(mine, copies, strict=True)):
                same = bool((copy == CONTENTS[key]).all())
                if number < right:
                    counts.add("believed" if same else "wrong")
                else:
                    counts.add("refused")
                    counts.add("caught", not same)


def work(role: str, path: str, fds: list[int], row: int, check: bool) -> None:
    """A writer or a reader. fds: of the counts, of the segments, then of the tables."""
    counts = Counts(fds[0], row)
    memory = dict(zip(SEGMENTS, fds[1:], strict=False))
    tables = dict(zip(SEGMENTS, fds[1 + len(SEGMENTS) :], strict=True))
    maps = {name: mmap.mmap(fd, SEGMENTS[name]) for name, fd in memory.items()}
    client = connected(path, memory, tables)
    if role == "write":
        write(client, maps, counts, row)
    views = {name: GenerationView.of_segment(fd, name) for name, fd in tables.items()}
    read(client, maps, views, counts, row, check)
