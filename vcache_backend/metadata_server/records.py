"""The records of the ledger, and the state that a sequence of records describes.

A ledger comes out of clients' memory, so every field is bounded: a record beyond a bound cannot be
decoded, and no value makes a later one overflow."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, cast

import msgspec

from vcache_backend.protocol.messages import (
    NAMESPACE_BYTES,
    TOKEN_BITS,
    ChunkKey,
    Field,
    Key,
    Location,
    Medium,
    NewId,
    SegmentBytes,
    SegmentId,
    Serial,
)

SLICE = 2048
"""Chunks in one record of a snapshot: about a millisecond of the server's time."""
MAX_SERVERS = 256
"""How many earlier servers a ledger names: the latest."""
MAX_EPOCHS = 256
"""The most namespaces with epochs of their own. One more namespace raises all epochs."""
MAX_HELD = 1 << 17
"""The most reservations in a ledger: more than a server has."""
Number = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
"""Of a reservation, or the epoch of a server: random, and then counted up."""
Namespace = Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)]


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process although pids are reused: its pid and start time in ticks since boot
    (field 22 of /proc/PID/stat). In another pid namespace: 0 and a random number."""

    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    started: Annotated[int, msgspec.Meta(ge=0, le=(1 << TOKEN_BITS) - 1)]


class SegmentAdded(msgspec.Struct, frozen=True, array_like=True, tag="S"):
    id: NewId
    device: Field
    medium: Medium
    nbytes: SegmentBytes


class SegmentGone(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    id: SegmentId


class Held(msgspec.Struct, frozen=True, array_like=True, tag="H", gc=False):
    """A reservation of chunks in prefix order: from now on `process` may write to the slots."""

    reservation: Number
    process: ProcessId
    chunks: dict[Key, Location]


class Published(msgspec.Struct, frozen=True, array_like=True, tag="C", gc=False):
    """A reservation was committed."""

    reservation: Number


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="R", gc=False):
    """A reservation's slots are free again."""

    reservation: Number


class Live(msgspec.Struct, frozen=True, array_like=True, tag="L", gc=False):
    """Committed chunks, the least recently used first, in a compacted ledger."""

    chunks: dict[Key, Location]


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="G", gc=False):
    """Chunks were evicted or removed."""

    keys: list[ChunkKey]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """All committed chunks of a namespace were removed, or of all namespaces with b""."""

    namespace: Namespace


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="N"):
    """The first record of a ledger: all generations up to `generation` may have been used. The
    ledger includes the ledgers of the earlier `servers`, named by their epochs."""

    generation: Serial
    servers: Annotated[list[Number], msgspec.Meta(max_length=MAX_SERVERS)] = []


class EpochTable(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    """All namespaces' epochs, see `epochs.Epochs`. b"" stands for namespaces not listed."""

    epochs: Annotated[dict[Namespace, Serial], msgspec.Meta(max_length=MAX_EPOCHS + 1)]


Record = (
    SegmentAdded
    | SegmentGone
    | Held
    | Published
    | Returned
    | Live
    | Gone
    | Cleared
    | Counted
    | EpochTable
)


class LedgerState(msgspec.Struct):
    """The content of a ledger: segments, locations of committed chunks (the least recently used
    first), open reservations, the newest generation, and the earlier servers whose ledgers are
    included."""

    generation: int = 0
    segments: dict[SegmentId, SegmentAdded] = {}
    chunks: dict[ChunkKey, Location] = {}
    held: dict[int, Held] = {}
    epochs: dict[bytes, int] = {}
    servers: list[int] = []
    shared: dict[SegmentId | int, SegmentId | int] = {}
    """Segments' ids and lengths that locations refer to."""
    spaces: dict[bytes, set[ChunkKey]] | None = None
    """The keys of each namespace, some gone since. The first `Cleared` builds the table; later ones
    need not go through all chunks."""

    def apply(self, record: Record) -> None:
        """Apply the next record."""
        match record:
            case SegmentAdded(id=id):
                self.segments[id] = record
            case SegmentGone(id=id):
                self.segments.pop(id, None)
                self.chunks = _without(self.chunks, id)
                self.held = {
                    number: msgspec.structs.replace(held, chunks=chunks)
                    for number, held in self.held.items()
                    if (chunks := _without(held.chunks, id))
                }
            case Held(reservation=reservation, process=process, chunks=chunks):
                chunks = {key: self._compact(at) for key, at in chunks.items()}
                self.held[reservation] = Held(reservation, process, chunks)
                generations = (location.generation for location in chunks.values())
                self.generation = max([self.generation, *generations])
            case Published(reservation=reservation):
                held = self.held.pop(reservation, None)
                if held:
                    self._publish(dict(reversed(held.chunks.items())))
            case Returned(reservation=reservation):
                self.held.pop(reservation, None)
            case Live(chunks=chunks):
                self._publish({key: self._compact(at) for key, at in chunks.items()})
            case Cleared(namespace=namespace):
                self._clear(namespace)
            case Counted(generation=generation, servers=servers):
                self.generation = max(self.generation, generation)
                self.servers = [*self.servers, *servers][-MAX_SERVERS:]
            case Gone(keys=keys):
                for key in keys:
                    self.chunks.pop(key, None)
            case EpochTable(epochs=epochs):
                self.epochs = epochs

    def _compact(self, at: Location) -> Location:
        """The same location. All have their segment's id and their length in common: 100 B less."""
        shared = self.shared.setdefault
        segment, length = shared(at.segment, at.segment), shared(at.length, at.length)
        return Location(cast("SegmentId", segment), at.offset, cast("int", length), at.generation)

    def _publish(self, chunks: dict[ChunkKey, Location]) -> None:
        self.chunks.update(chunks)
        if self.spaces is not None:
            self._note(self.spaces, chunks)

    def _clear(self, namespace: bytes) -> None:
        if not namespace:
            self.chunks = {}
            self.spaces = None
            return
        if self.spaces is None:
            self.spaces = {}
            self._note(self.spaces, self.chunks)
        for key in self.spaces.pop(namespace, ()):
            self.chunks.pop(key, None)

    @staticmethod
    def _note(spaces: dict[bytes, set[ChunkKey]], keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            spaces.setdefault(key[:NAMESPACE_BYTES], set()).add(key)

    def hide_processes(self) -> None:
        """Make all pids anonymous, since the pids belong to another pid namespace: this server
        cannot tell whether these processes have ended."""
        hidden: dict[ProcessId, ProcessId] = {}
        for number, held in self.held.items():
            process = held.process
            if process.pid:
                unseen = hidden.setdefault(process, ProcessId(0, secrets.randbits(TOKEN_BITS)))
                self.held[number] = msgspec.structs.replace(held, process=unseen)

    def records(self) -> Iterator[Record]:
        """A short sequence of records that describes this state, without the committed chunks."""
        yield Counted(self.generation, self.servers)
        yield EpochTable(self.epochs)
        yield from self.segments.values()
        yield from self.held.values()

    def pieces(self, size: int) -> Iterator[dict[ChunkKey, Location]]:
        """The committed chunks, at most `size` in a piece."""
        chunks = iter(self.chunks.items())
        while piece := dict(islice(chunks, size)):
            yield piece


def _without(chunks: dict[ChunkKey, Location], segment: SegmentId) -> dict[ChunkKey, Location]:
    """The chunks that do not lie in this segment."""
    return {key: location for key, location in chunks.items() if location.segment != segment}
