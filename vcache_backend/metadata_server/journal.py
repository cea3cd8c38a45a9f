"""What a restarted server must know, appended to a file beside the socket before any answer that depends on it leaves.

Written with `write(2)`, never synced: it has to outlive the server process, not the machine (the VRAM does not either).
Compaction copies the live state into a new file a slice at a time while records go to both files, so no request waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vcache_backend.metadata_server.messages import ChunkKey, Location, Medium, SegmentId

COMPACT_BYTES = 64 << 20
"""A journal smaller than this is never compacted."""


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """A process for good, as pids are reused: pid and start time in ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int


class SegmentAdded(msgspec.Struct, frozen=True, array_like=True, tag="S"):
    id: SegmentId
    device: str
    medium: Medium
    nbytes: int


class SegmentGone(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    id: SegmentId


class Held(msgspec.Struct, frozen=True, array_like=True, tag="H", gc=False):
    """A reservation: its slots may be written by `process` from now on."""

    reservation: int
    process: ProcessId
    keys: list[ChunkKey]
    locations: list[Location]


class Published(msgspec.Struct, frozen=True, array_like=True, tag="C", gc=False):
    """A reservation was committed; its keys are in prefix order."""

    reservation: int


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="R", gc=False):
    """A reservation's slots are free again."""

    reservation: int


class Live(msgspec.Struct, frozen=True, array_like=True, tag="L", gc=False):
    """Part of a snapshot: committed chunks, coldest first."""

    keys: list[ChunkKey]
    locations: list[Location]
    pins: list[int]


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="G", gc=False):
    """Chunks evicted or removed."""

    keys: list[ChunkKey]


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag="P", gc=False):
    keys: list[ChunkKey]
    pin: int


Record = SegmentAdded | SegmentGone | Held | Published | Returned | Live | Gone | Pinned


class State(msgspec.Struct):
    """What a journal says: segments, committed chunks coldest first as (location, pin), open reservations."""

    segments: dict[SegmentId, SegmentAdded] = {}
    chunks: dict[ChunkKey, tuple[Location, int]] = {}
    held: dict[int, Held] = {}

    def apply(self, record: Record) -> None:
        match record:
            case SegmentAdded(id=id):
                self.segments[id] = record
            case SegmentGone(id=id):
                self.segments.pop(id, None)
                self.chunks = {key: chunk for key, chunk in self.chunks.items() if chunk[0].segment != id}
            case Held(reservation=reservation):
                self.held[reservation] = record
            case Published(reservation=reservation):
                held = self.held.pop(reservation, None)
                for key, location in reversed(list(zip(held.keys, held.locations, strict=True)) if held else []):
                    self.chunks[key] = (location, 0)
            case Returned(reservation=reservation):
                self.held.pop(reservation, None)
            case Live(keys=keys, locations=locations, pins=pins):
                self.chunks.update(zip(keys, zip(locations, pins, strict=True), strict=True))
            case Gone(keys=keys):
                for key in keys:
                    self.chunks.pop(key, None)
            case Pinned(keys=keys, pin=pin):
                for key in keys:
                    if key in self.chunks:
                        self.chunks[key] = (self.chunks[key][0], pin)


def read(path: Path) -> State:
    """Replay a journal. A torn or damaged end is ignored from the first bad record on; no file is an empty state."""
    state = State()
    decoder = msgspec.msgpack.Decoder(Record)
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return state
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frame = data[at + 4 : at + 4 + size]
        try:
            state.apply(decoder.decode(frame))
        except (msgspec.DecodeError, ValueError):
            break
        at += 4 + size
    return state


def newest_id(state: State) -> int:
    """The largest reservation id or generation in a journal's state; 0 if it is empty."""
    locations = [location for location, _ in state.chunks.values()]
    locations += [location for held in state.held.values() for location in held.locations]
    return max([0, *state.held, *(location.generation for location in locations)])


class Journal:
    """The open file, owned by the server's loop. OSErrors (a full disk) reach the loop, which goes on without a journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._file = self._create(path.with_suffix(".new"))
        self._next: int | None = None
        self._slices: Iterator[Record] | None = None
        self._size = 0
        self._base = 0

    def start(self, snapshot: Iterator[Record]) -> None:
        """Write the state the server starts from, then put this file in the old one's place."""
        for record in snapshot:
            self._size += self._write(self._file, [record])
        self._base = self._size
        self._path.with_suffix(".new").replace(self._path)

    def append(self, records: list[Record]) -> None:
        """Write records; they are safe against this process's death on return."""
        self._size += self._write(self._file, records)
        if self._next is not None:
            self._write(self._next, records)

    def compact(self, snapshot: Callable[[], Iterator[Record]]) -> None:
        """One slice of compaction, if one is due or under way. Called between requests."""
        if self._slices is None:
            if self._size < max(COMPACT_BYTES, 4 * self._base):
                return
            self._next, self._slices = self._create(self._path.with_suffix(".new")), snapshot()
        assert self._next is not None
        record = next(self._slices, None)
        if record is not None:
            self._write(self._next, [record])
            return
        self._path.with_suffix(".new").replace(self._path)
        os.close(self._file)
        self._file, self._next, self._slices = self._next, None, None
        self._base = self._size = os.fstat(self._file).st_size

    def abandon(self) -> None:
        """The file can no longer be kept true: remove it, since a stale journal would bring back the wrong chunks."""
        self.close()
        for path in (self._path, self._path.with_suffix(".new")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for fd in (self._file, self._next):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._file, self._next = -1, None

    def _create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _write(self, fd: int, records: list[Record]) -> int:
        out = bytearray()
        for record in records:
            frame = self._encoder.encode(record)
            out += len(frame).to_bytes(4, "little")
            out += frame
        view = memoryview(out)
        while view:
            view = view[os.write(fd, view) :]
        return len(out)
