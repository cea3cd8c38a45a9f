"""Slots being written: who may still commit them, and which ones wait until their writer is surely done. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from vcache_backend.metadata_server.journal import ProcessId
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.metadata_server.placement import Entry

MAX_RESERVATIONS_PER_CLIENT = 4096


class Reservation(msgspec.Struct, gc=False):
    """`client` is None once it can no longer be committed (after `deadline`, connection lost, server restarted): the slots then
    wait in quarantine until the writer answers for them or is gone, however long that takes."""

    client: int | None
    process: ProcessId
    deadline: float
    entries: list[Entry]


class Reservations:
    """The table of reservations. Times in seconds on the server's monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._by_id: dict[int, Reservation] = {}
        self._of_client: Counter[int] = Counter()
        self._pending: dict[ChunkKey, int] = {}

    def pending(self, key: ChunkKey) -> bool:
        """Is somebody writing this chunk?"""
        return key in self._pending

    def pending_count(self) -> int:
        return len(self._pending)

    def full(self, client: int) -> bool:
        """Has the client as many reservations as it may have?"""
        return self._of_client[client] >= MAX_RESERVATIONS_PER_CLIENT

    def get(self, id_: int) -> Reservation | None:
        return self._by_id.get(id_)

    def items(self) -> list[tuple[int, Reservation]]:
        return list(self._by_id.items())

    def announce(self, key: ChunkKey, id_: int) -> None:
        """`key` is being written under reservation `id_`, which is about to open."""
        self._pending[key] = id_

    def open(self, id_: int, client: int, process: ProcessId, entries: list[Entry], now: float) -> None:
        self._by_id[id_] = Reservation(client, process, now + self.seconds, entries)
        self._of_client[client] += 1

    def restore(self, id_: int, process: ProcessId, entries: list[Entry]) -> None:
        """A reservation of an earlier server: void from the start."""
        self._by_id[id_] = Reservation(None, process, 0.0, entries)

    def close(self, id_: int) -> Reservation:
        """Take it out of the table; its keys are free for others."""
        reservation = self._by_id[id_]
        self._free_keys(id_, reservation)
        return self._by_id.pop(id_)

    def void(self, id_: int) -> None:
        """It can no longer be committed, and others may store its keys; its slots stay out of use."""
        reservation = self._by_id[id_]
        self._free_keys(id_, reservation)
        reservation.client = None

    def overdue(self, now: float) -> list[int]:
        """Open ones whose time is over."""
        return [id_ for id_, r in self._by_id.items() if r.client is not None and now > r.deadline]

    def quarantined(self, entry: Entry) -> bool:
        """Does this slot wait for a writer that can no longer commit it?"""
        reservation = self._by_id.get(entry.reservation)
        return reservation is not None and reservation.client is None

    def let_go(self, entries: list[Entry]) -> None:
        """These quarantined slots leave the pool with their memory: nobody need answer for them any more."""
        gone = {id(entry) for entry in entries}
        for id_ in {entry.reservation for entry in entries}:
            kept = [entry for entry in self._by_id[id_].entries if id(entry) not in gone]
            self._by_id[id_].entries = kept
            if not kept:
                del self._by_id[id_]

    def writers(self) -> Counter[int]:
        """Quarantined slots by the pid of their writer."""
        slots: Counter[int] = Counter()
        for reservation in self._by_id.values():
            if reservation.client is None:
                slots[reservation.process.pid] += len(reservation.entries)
        return slots

    def counts(self) -> tuple[int, int]:
        """(open, quarantined)."""
        void = sum(r.client is None for r in self._by_id.values())
        return len(self._by_id) - void, void

    def _free_keys(self, id_: int, reservation: Reservation) -> None:
        for entry in reservation.entries:
            if self._pending.get(entry.key) == id_:
                del self._pending[entry.key]
        if reservation.client is not None:
            self._of_client[reservation.client] -= 1
            if not self._of_client[reservation.client]:
                del self._of_client[reservation.client]
