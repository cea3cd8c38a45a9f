"""Fair shares of a limited amount, by process and user. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


def room(free: int, process: tuple[int, float], user: tuple[int, float], least: int = 0) -> int:
    """How much more a process may take of the `free` amount. process, user: how much the process
    and its user hold, and how many times their new amount must stay free afterwards. A process may
    have `least` as long as it is free.

    So some always stays free for others: of N, k processes with `times` 1 get at most N / (k + 1)
    each."""
    shares = [(free - times * held) / (1 + times) for held, times in (process, user)]
    return max(0, int(min(free, max(min(shares), least - process[0]))))


def user(uid: int, pid: int) -> int:
    """The user whose share a process uses. Processes that are not visible here (pid 0) cannot be
    told apart: they share as one further user."""
    return uid if pid else -1 - uid


class Shares:
    """How much of `whole` each process and user holds. process, user, least: see `room`."""

    def __init__(self, whole: int, process: float, user: float, least: int = 0) -> None:
        self.whole, self._process, self._user, self._least = whole, process, user, least
        self._processes: Counter[Hashable] = Counter()
        self._users: Counter[Hashable] = Counter()

    @property
    def taken(self) -> int:
        """The sum that all processes hold."""
        return self._users.total()

    def room(self, process: Hashable, user: int) -> int:
        """How much more this process of this user may take. process: None if unknown."""
        free = self.whole - self.taken
        held = 0 if process is None else self._processes[process]
        return room(free, (held, self._process), (self._users[user], self._user), self._least)

    def take(self, process: Hashable, user: int, amount: int) -> None:
        """Note that the process took `amount`, or gave it back if negative."""
        for table, holder in ((self._processes, process), (self._users, user)):
            table[holder] += amount
            if not table[holder]:
                del table[holder]
