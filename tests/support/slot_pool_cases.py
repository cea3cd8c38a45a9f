"""A pool of slots with generations among real processes: a server with a socket, writers and
readers, segments in host memory. Test support: the product does not speak this protocol.

The bytes of a chunk follow from its key, so each reader can tell right bytes from wrong ones. It
counts what it believed and what it did not, in memory that all processes share."""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import socket
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from model import chunk_key

from vcache_backend.metadata_server import processes, slot_directory
from vcache_backend.metadata_server.processes import Peer
from vcache_backend.metadata_server.slot_directory import (
    SlotDirectory,
    SlotGrant,
    SlotRegion,
    SlotRun,
)
from vcache_backend.metadata_server.slots import SlotsTable
from vcache_backend.protocol import trust
from vcache_backend.protocol.messages import ChunkKey, SegmentId
from vcache_backend.vram_pool.generations import GenerationView

CHUNK = 16384
KEYS = [chunk_key(number) for number in range(160)]
SLOTS = 48
SEGMENTS = {f"s{number}": SLOTS * CHUNK for number in range(2)}
WRITE_SECONDS, PIN_SECONDS = 0.05, 0.002
COUNTS = ("believed", "refused", "caught", "wrong", "stored", "late")
"""Chunks: right ones that a reader believed, those that it did not, how many of these were wrong,
wrong ones that it believed; committed, and committed too late or by nobody's leave."""


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


CONTENTS = {
    key: np.arange(CHUNK // 8, dtype=np.uint64) + np.uint64((number + 1) << 32)
    for number, key in enumerate(KEYS)
}


# ---- the server


class Suicidal:
    """Stores of a server that is killed at one of them, now and then."""

    def __init__(self, view: Any, odds: float) -> None:
        self._view, self._odds = view, odds

    def __getitem__(self, at: Any) -> Any:
        return self._view[at]

    def __setitem__(self, at: int, value: int) -> None:
        if random.random() < self._odds:
            os.kill(os.getpid(), signal.SIGKILL)
        self._view[at] = value
        if random.random() < self._odds:
            os.kill(os.getpid(), signal.SIGKILL)


class PoolServer:
    """Answers one request of each client at a time. odds: of its death at a store. control: what it
    leaves out."""

    def __init__(self, path: str, odds: float, control: str) -> None:
        self._directory = SlotDirectory(time.monotonic, WRITE_SECONDS)
        if control == "quarantine":
            self._directory._quarantine = self._free_at_once  # type: ignore[method-assign]
        self._odds = odds
        self._watch = processes.Watch()
        self._clients: dict[socket.socket, Peer] = {}
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)

    def run(self) -> None:
        ids = 0
        while True:
            ready = select.select([self._listener, *self._clients], [], [], 0.01)[0]
            for one in ready:
                if one is self._listener:
                    ids += 1
                    sock = one.accept()[0]
                    process = processes.identity(trust.peer(sock)[0])
                    self._clients[sock] = Peer(ids, process, "host", "host")
                else:
                    self._serve(one)
            self._directory.tick()
            connected = {client.process for client in self._clients.values()}
            for gone in self._watch.ended(self._directory.writers(), connected):
                self._directory.process_gone(gone)

    def _serve(self, sock: socket.socket) -> None:
        client, message, fds = self._clients[sock], b"", []
        with suppress(OSError):
            message, fds, _, _ = socket.recv_fds(sock, 1 << 17, 8)
        if not message:
            self._directory.disconnect(self._clients.pop(sock).id)
            sock.close()
            return
        what, *arguments = msgspec.msgpack.decode(message)
        answer, give = getattr(self, f"_{what}")(client, fds, *arguments)
        for fd in fds:
            os.close(fd)
        with suppress(OSError):
            socket.send_fds(sock, [msgspec.msgpack.encode(answer)], give)

    def _add(self, client: Peer, fds: list[int], name: str) -> tuple[Any, list[int]]:
        """A segment, with its table unless it is new. The answer has the table."""
        regions = self._directory.regions.values()
        known = [region.table for region in regions if region.id == name]
        if not known:
            nbytes = SEGMENTS[name]
            take = SlotsTable.take_over
            table = take(fds[0], name, nbytes) if fds else SlotsTable.create(name, nbytes)
            if self._odds:
                table.words = Suicidal(table.words, self._odds)
                table.generations = Suicidal(table.generations, self._odds)
            self._directory.add(SlotRegion(SegmentId(name), "host", nbytes, table))
            known = [table]
        return True, [known[0].fd]

    def _find(self, client: Peer, fds: list[int], keys: list[bytes]) -> tuple[Any, list[int]]:
        return self._directory.find([ChunkKey(key) for key in keys], PIN_SECONDS), []

    def _reserve(self, client: Peer, fds: list[int], keys: list[bytes]) -> tuple[Any, list[int]]:
        reply = self._directory.reserve(client, [ChunkKey(key) for key in keys], CHUNK)
        slots = [slot if isinstance(slot, SlotGrant) else None for slot in reply.slots]
        return (reply.number, slots), []

    def _commit(self, client: Peer, fds: list[int], number: int) -> tuple[Any, list[int]]:
        return self._directory.commit(client, number), []

    def _free_at_once(self, number: int) -> None:
        write = self._directory._shut(number)
        for place in write.places.values():
            region, slot = self._directory._at(place)
            region.table.free(slot)
            self._directory._give(place)


# ---- clients


class PoolClient:
    """Connects again whenever the server is gone, and shows it the tables."""

    def __init__(self, path: str, tables: dict[str, int], memory: dict[str, int]) -> None:
        self._path, self._tables = path, tables
        self.maps = {name: mmap.mmap(fd, SEGMENTS[name]) for name, fd in memory.items()}
        self._socket: socket.socket | None = None

    def ask(self, *request: Any) -> Any:
        """None if the server is gone."""
        try:
            if self._socket is None:
                self._connect()
            return self._exchange(request, [])[0]
        except OSError:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            time.sleep(0.005)
            return None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(10)
        self._socket.connect(self._path)
        for name in SEGMENTS:
            shown = [self._tables[name]] if name in self._tables else []
            _, fds = self._exchange(["add", name], shown)
            if self._tables.setdefault(name, fds[0]) != fds[0]:
                os.close(fds[0])

    def _exchange(self, request: Any, fds: list[int]) -> tuple[Any, list[int]]:
        assert self._socket is not None
        socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], fds)
        message, got, _, _ = socket.recv_fds(self._socket, 1 << 17, 8)
        if not message:
            raise ConnectionResetError
        return msgspec.msgpack.decode(message), got


def prefix(chance: random.Random) -> list[ChunkKey]:
    """Some are asked for more often."""
    start = int(len(KEYS) * chance.random() ** 2) // 4 * 4
    return KEYS[start : start + 4]


def write(client: PoolClient, counts: Counts, seed: int) -> None:
    """Store prefixes, slowly. Pauses at times, longer than the server waits."""
    chance = random.Random(seed)
    while True:
        keys = prefix(chance)
        reply = client.ask("reserve", keys)
        if reply is None or not reply[0]:
            time.sleep(0.001)
            continue
        for key, slot in zip(keys, reply[1], strict=True):
            if slot is None:
                continue
            name, offset = slot
            target = np.frombuffer(client.maps[name], np.uint64, CHUNK // 8, offset)
            data = CONTENTS[key]
            for part in range(0, len(data), 512):
                target[part : part + 512] = data[part : part + 512]
                if chance.random() < 0.01:
                    time.sleep(chance.choice([0.0005, 0.01, 3 * WRITE_SECONDS]))
        done = client.ask("commit", reply[0])
        counts.add("stored" if done else "late", done or 1)


def read(
    client: PoolClient, views: dict[str, GenerationView], counts: Counts, seed: int, check: bool
) -> None:
    """Copy prefixes, slowly at times, and compare what is believed. check: ask the generations."""
    chance = random.Random(seed)
    while True:
        keys = prefix(chance)
        for found in client.ask("find", keys) or ():
            run = SlotRun(*found)
            slots = np.frombuffer(run.slots, np.uint32)
            copies = []
            for slot in slots.tolist():
                at = run.offset + (slot - run.base) * run.slot_bytes
                source = np.frombuffer(client.maps[run.segment], np.uint64, CHUNK // 8, at)
                copy = np.empty(CHUNK // 8, np.uint64)
                copy[:1000] = source[:1000]
                if chance.random() < 0.3:
                    time.sleep(chance.choice([0.0002, 0.005, 0.05]))
                copy[1000:] = source[1000:]
                copies.append(copy)
            right = (
                views[run.segment].leading(run.slots, run.generations, 1) if check else len(slots)
            )
            mine = keys[run.first : run.first + len(slots)]
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
    client = PoolClient(path, tables, memory)
    if role == "write":
        write(client, counts, row)
    views = {name: GenerationView.of_segment(fd, name) for name, fd in tables.items()}
    read(client, views, counts, row, check)


def serve(path: str, odds: float, control: str) -> None:
    slot_directory.SLABS_WANTED = 4
    PoolServer(path, odds, control).run()
