"""Leases on committed chunks: who may read what until when. Pure: the clock is passed in."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Generator

import msgspec

from vcache_backend.metadata_server.messages import GRACE_SECONDS
from vcache_backend.metadata_server.placement import Entry

MAX_LEASES_PER_CLIENT = 65_536
MAX_LEASED_PER_CLIENT = 1 << 18
"""Most chunks under the leases of one client, each counted once a lease."""
AT_ONCE = 1024
"""Most chunks that a release lets go of before it is answered, and most leases that one look at the clock ends."""


class Grant(msgspec.Struct, gc=False):
    """One reader's hold on some chunks until `deadline` (the server's monotonic clock, seconds). `client`: None once its connection
    is gone and nothing but the deadline ends it."""

    client: int | None
    deadline: float
    entries: list[Entry]


class Leases:
    """The table of leases. `held(entry)` is called whenever an entry's first lease begins, `unheld(entry)` when its last one is over:
    at the end of the lease, or a few turns later (`let_go`) where that had many."""

    def __init__(self, seconds: float, held: Callable[[Entry], None], unheld: Callable[[Entry], None]) -> None:
        self.seconds = seconds
        self.expired = 0
        self._held, self._unheld = held, unheld
        self._leases: dict[int, Grant] = {}
        self._of_client: dict[int, set[int]] = {}
        self._leased_by: Counter[int] = Counter()
        self._deadlines: list[tuple[float, int]] = []
        self.ended: deque[list[Entry]] = deque()
        """Entries of leases that are over: something for `let_go` to do."""

    def __len__(self) -> int:
        return len(self._leases)

    def full(self, client: int, more: int = 1) -> bool:
        """Whether the client has as many leases as it may have, or would have too many chunks with `more`."""
        leases = len(self._of_client.get(client, ()))
        return leases >= MAX_LEASES_PER_CLIENT or self._leased_by[client] + more > MAX_LEASED_PER_CLIENT

    def grant(self, lease: int, client: int, entries: list[Entry], now: float) -> None:
        """`entries`: each once."""
        for entry in entries:
            if not entry.leases:
                self._held(entry)
            entry.leases += 1
        self._leases[lease] = Grant(client, now + self.seconds, entries)
        self._of_client.setdefault(client, set()).add(lease)
        self._leased_by[client] += len(entries)
        heapq.heappush(self._deadlines, (now + self.seconds, lease))
        self._forget_ended(2)

    def renew(self, lease: int, now: float) -> bool:
        """Full time again for a lease that still holds, whoever asks: one process may read under another's lease."""
        held = self._holding(lease, now)
        if held is None:
            return False
        held.deadline = now + self.seconds
        if held.client not in self._of_client:
            held.client = None
        return True

    def release(self, lease: int, now: float) -> bool:
        """End a lease, whoever asks; whether it held until now."""
        if self._holding(lease, now) is None:
            return False
        self._end(lease)
        return True

    def expire(self, now: float) -> None:
        """End leases whose time is over, up to `AT_ONCE`. A renewed one is looked at again at its new deadline."""
        self._forget_ended(AT_ONCE)
        for _ in range(AT_ONCE):
            if not self._deadlines or self._deadlines[0][0] > now:
                break
            _, lease = heapq.heappop(self._deadlines)
            held = self._leases.get(lease)
            if held is not None and held.deadline > now:
                heapq.heappush(self._deadlines, (held.deadline, lease))
            else:
                self._holding(lease, now)

    def drop_client(self, client: int, now: float) -> Generator[int, None, int]:
        """End all leases of a client that is gone, those granted within the last `GRACE_SECONDS` when that time is over: in steps."""
        for lease in self._of_client.pop(client, ()):
            held = self._leases.get(lease)
            if held is None or held.client is None:
                continue
            held.client = None
            held.deadline = min(held.deadline, held.deadline - self.seconds + GRACE_SECONDS)
            if held.deadline > now:
                heapq.heappush(self._deadlines, (held.deadline, lease))
                yield 1
            else:
                entries = len(held.entries)
                self._end(lease)
                yield 1 + entries
        del self._leased_by[client]
        return 0

    def let_go(self, most: int = AT_ONCE) -> int:
        """Entries of leases that are over are held no longer, up to `most`; how many there were."""
        count = 0
        while self.ended and count < most:
            entries = self.ended[0]
            entry = entries.pop()
            if not entries:
                self.ended.popleft()
            entry.leases -= 1
            if not entry.leases:
                self._unheld(entry)
            count += 1
        return count

    def _forget_ended(self, most: int) -> None:
        """Take from the queue of deadlines the next ones of leases that ended before: two for each that is granted keep it short."""
        for _ in range(most):
            if not self._deadlines or self._deadlines[0][1] in self._leases:
                break
            heapq.heappop(self._deadlines)

    def _holding(self, lease: int, now: float) -> Grant | None:
        """The lease, if it holds still; one whose time is over ends here."""
        held = self._leases.get(lease)
        if held is not None and held.deadline <= now:
            self._end(lease)
            self.expired += 1
            return None
        return held

    def _end(self, lease: int) -> None:
        held = self._leases.pop(lease)
        if held.client in self._of_client:
            of_client = self._of_client[held.client]
            of_client.discard(lease)
            self._leased_by[held.client] -= len(held.entries)
            if not of_client:
                del self._of_client[held.client], self._leased_by[held.client]
        self.ended.append(held.entries)
        if len(self.ended) == 1:
            self.let_go()
