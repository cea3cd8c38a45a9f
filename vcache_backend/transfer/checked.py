"""A scatter whose bytes are checked, as one completion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vcache_backend.errors import ChecksumError
from vcache_backend.vram_pool.copier import Completion

if TYPE_CHECKING:
    from vcache_backend.vram_pool.checksum import Look


class CheckedScatter:
    """Over once a scatter and the look at its slots' checksums both are. `tell`: is given the numbers of bad slots, once.

    A Completion. `done` and `wait` raise ChecksumError, as soon as nothing of both runs any more, if a slot is bad.
    """

    def __init__(self, copy: Completion, look: Look, tell: Callable[[list[int]], None]) -> None:
        self._copy, self._look, self._tell = copy, look, tell
        self._lock = threading.Lock()
        self._bad: list[int] | None = None

    def done(self) -> bool:
        return self._copy.done() and self._look.over.done() and self._right()

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        return self._copy.wait(timeout_s) and self._look.over.wait(max(until - time.monotonic(), 0.0)) and self._right()

    @property
    def seconds(self) -> float | None:
        """Of the scatter."""
        return self._copy.seconds

    def _right(self) -> bool:
        with self._lock:
            if self._bad is None:
                self._bad = self._look.bad()
                if self._bad:
                    self._tell(self._bad)
        if self._bad:
            raise ChecksumError(
                f"{len(self._bad)} chunks do not fit their checksums; the first is number {self._bad[0]} of the load"
            )
        return True
