"""Reservations: slots being written, their writers, and slots that wait until the writer has surely
finished. Pure.

Claims: a worker claims bytes before it allocates memory for the pool. A refusal after the
allocation would waste memory, and the allocation might be too much for a GPU.

A hostile client can make many reservations, so look-ups by client, process and time are indexed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, takewhile

import msgspec

from vcache_backend.metadata_server.pool.slots import Entry
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.protocol.messages import NAMESPACE_BYTES, ChunkKey

MAX_RESERVATIONS_PER_CLIENT = 1024
MAX_WRITTEN = 1 << 16
"""About the most slots of all clients that are reserved or in quarantine: a `Clear` voids all of
them in one turn."""
MAX_OVERDUE = 1024
"""The most reservations that a call of `overdue` returns; the next call continues."""
CLAIM_SECONDS = 120.0
"""How long a worker may take to allocate its claim. Then other workers may claim the bytes."""


class Reservation(msgspec.Struct, gc=False):
    """Slots that one client writes. `client` is None once the reservation is void: after
    `deadline`, a lost connection, a clear or a restart of the server.

    Void slots stay in quarantine until their writer commits, aborts, or its process ends."""

    client: int | None
    process: ProcessId
    deadline: float
    entries: list[Entry]
    namespaces: frozenset[bytes] = frozenset()


class Reservations:
    """The table of reservations. Times are seconds on the server's monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: dict[int, Reservation] = {}
        """Reservations that can be committed, in order of deadlines: all last equally long."""
        self._void: dict[int, Reservation] = {}
        self._of_client: dict[int, dict[int, None]] = {}
        self._of_writer: dict[ProcessId, dict[int, None]] = {}
        """The void reservations of each process."""
        self._pending: dict[ChunkKey, int] = {}
        """The last reservation of each key, perhaps void."""

    def pending(self, key: ChunkKey) -> bool:
        """Whether a client is writing this chunk and may still commit it."""
        return self._pending.get(key) in self._open

    def among(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """The keys whose chunks are being written."""
        return {key for key in self._pending.keys() & keys if self._pending[key] in self._open}

    def full(self, client: int) -> bool:
        return len(self._of_client.get(client, ())) >= MAX_RESERVATIONS_PER_CLIENT

    def get(self, id_: int) -> Reservation | None:
        return self._open.get(id_) or self._void.get(id_)

    def of_client(self, client: int) -> list[int]:
        return list(self._of_client.get(client, ()))

    def of_namespace(self, namespace: bytes) -> list[int]:
        """The open reservations with a chunk of the namespace; all open reservations with b""."""
        return [
            id_
            for id_, open_ in self._open.items()
            if not namespace or namespace in open_.namespaces
        ]

    def of_writer(self, process: ProcessId) -> list[int]:
        """The void reservations of a process."""
        return list(self._of_writer.get(process, ()))

    def overdue(self, now: float) -> list[int]:
        """Up to `MAX_OVERDUE` open reservations whose time is over."""
        return [
            id_
            for id_, _ in takewhile(
                lambda pair: now > pair[1].deadline, islice(self._open.items(), MAX_OVERDUE)
            )
        ]

    def open(
        self, id_: int, client: int, process: ProcessId, entries: list[Entry], now: float
    ) -> None:
        """Add a reservation: the client writes to the slots, and may commit within `seconds`."""
        self._pending.update((entry.key, id_) for entry in entries)
        namespaces = frozenset({entry.key[:NAMESPACE_BYTES] for entry in entries})
        self._open[id_] = Reservation(client, process, now + self.seconds, entries, namespaces)
        self._of_client.setdefault(client, {})[id_] = None

    def restore(self, id_: int, process: ProcessId, entries: list[Entry]) -> None:
        """Take over a reservation of an earlier server as void."""
        self._quarantine(id_, Reservation(None, process, 0.0, entries))

    def close(self, id_: int) -> Reservation:
        """Remove a reservation. Other clients may store its keys."""
        reservation = self._shut(id_) if id_ in self._open else self._leave(id_)
        self._forget_keys(id_, reservation.entries)
        return reservation

    def void(self, ids: Iterable[int]) -> None:
        """Void reservations: no client can commit them, other clients may store the keys, and the
        slots stay in quarantine."""
        for id_ in ids:
            reservation = self._shut(id_)
            reservation.client = None
            self._quarantine(id_, reservation)

    def quarantined(self, entry: Entry) -> bool:
        return entry.reservation in self._void

    def let_go(self, entries: list[Entry]) -> None:
        """Drop quarantined slots whose memory leaves the pool: no writer matters any more."""
        gone: dict[int, list[Entry]] = {}
        for entry in entries:
            gone.setdefault(entry.reservation, []).append(entry)
        for id_, dropped in gone.items():
            identities = {id(entry) for entry in dropped}
            self._forget_keys(id_, dropped)
            self._void[id_].entries = [
                entry for entry in self._void[id_].entries if id(entry) not in identities
            ]
            if not self._void[id_].entries:
                self._leave(id_)

    def processes(self) -> set[ProcessId]:
        """The processes whose end frees quarantined slots."""
        return set(self._of_writer)

    def writers(self) -> Counter[int]:
        """The number of quarantined slots by the pid of their writer."""
        slots: Counter[int] = Counter()
        for reservation in self._void.values():
            slots[reservation.process.pid] += len(reservation.entries)
        return slots

    def counts(self) -> tuple[int, int]:
        """The numbers of open and of quarantined reservations."""
        return len(self._open), len(self._void)

    def _shut(self, id_: int) -> Reservation:
        reservation = self._open.pop(id_)
        assert reservation.client is not None
        of_client = self._of_client[reservation.client]
        del of_client[id_]
        if not of_client:
            del self._of_client[reservation.client]
        return reservation

    def _quarantine(self, id_: int, reservation: Reservation) -> None:
        self._void[id_] = reservation
        self._of_writer.setdefault(reservation.process, {})[id_] = None

    def _leave(self, id_: int) -> Reservation:
        reservation = self._void.pop(id_)
        of_writer = self._of_writer[reservation.process]
        del of_writer[id_]
        if not of_writer:
            del self._of_writer[reservation.process]
        return reservation

    def _forget_keys(self, id_: int, entries: list[Entry]) -> None:
        for entry in entries:
            if self._pending.get(entry.key) == id_:
                del self._pending[entry.key]


class Claims:
    """Memory about to be allocated for the pool, by device. At most one claim for each client."""

    def __init__(self) -> None:
        self._of_client: dict[int, tuple[str, int, float]] = {}
        """The device, the bytes, and the end of the claim."""

    def grant(self, client: int, device: str, missing: int, now: float) -> int:
        """Grant the client the part of the `missing` bytes of a device that no other client claims.
        Ends the client's earlier claim."""
        self.end(client)
        others = sum(
            nbytes
            for claimed, nbytes, until in self._of_client.values()
            if claimed == device and now <= until
        )
        nbytes = max(missing - others, 0)
        if nbytes:
            self._of_client[client] = device, nbytes, now + CLAIM_SECONDS
        return nbytes

    def end(self, client: int) -> None:
        """End the claim of a client that has added its segment, or has none to add."""
        self._of_client.pop(client, None)
