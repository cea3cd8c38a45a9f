"""What the server's answers say beside what was asked: resets by other instances, and copies."""

from __future__ import annotations

from collections import deque

from vcache_backend.protocol.messages import Copies, Found, Promised, Reply, Segments


class ServerNews:
    """`hear` runs in any thread, for one answer at a time; the rest in the scheduler's thread."""

    def __init__(self, copies: bool) -> None:
        """copies: the instance gives up chunks that others hold (see `duplicates.Duplicates`)."""
        self.epoch = 0
        """The namespace's epoch as of the last `learn`: of all that steps store, publish and
        promise."""
        self._heard = 0
        """The namespace's epoch in the server's last answer."""
        self.copies: deque[list[Copies]] = deque(maxlen=64 if copies else 0)
        """Chunks in other instances, too, as the server has told of them: the last messages that
        wait for a step."""
        self.waiting = False
        """`learn` has something to do, or `copies` has a message."""

    def hear(self, reply: Reply) -> None:
        """Note an answer's news for the next `learn`."""
        if isinstance(reply, Segments):
            # A server that has lost its resets begins again.
            self._heard = reply.epoch
        elif isinstance(reply, Found | Promised):
            # Answers about no chunks have no epoch. A `kv_producer` looks nothing up, but promises.
            self._heard = max(self._heard, reply.epoch)
        if isinstance(reply, Found | Segments) and reply.copies and self.copies.maxlen:
            self.copies.append(reply.copies)
            self.waiting = True
        if self._heard != self.epoch:
            self.waiting = True

    def learn(self) -> bool:
        """Take over the epoch that `hear` noted. True if the namespace was reset, or a server has
        lost its resets: see `Resets.on_reset_elsewhere`."""
        # First: another thread may note more from now on.
        self.waiting = bool(self.copies)
        before, self.epoch = self.epoch, self._heard
        return self.epoch != before
