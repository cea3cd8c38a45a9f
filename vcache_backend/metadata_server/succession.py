"""Takes over the pools of earlier servers, from the ledgers that clients bring."""

from __future__ import annotations

import logging
import time

from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.ledger import Damaged, EarlierLedger
from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.records import MAX_HELD, MAX_SERVERS, LedgerState
from vcache_backend.protocol.messages import MAX_SEGMENTS

log = logging.getLogger(__name__)

HEIR_SECONDS = 5.0
"""How long to wait for a later server's ledger, after a client has brought one that such a server
took over. Clients come back within some two seconds."""


class Predecessors:
    """Takes over the ledgers of earlier servers, in any order.

    Once a server has ended, its ledger is the whole truth about its segments, as long as no server
    has taken the ledger over: no other server gave out the slots. Segments of any other ledger are
    never used again. A server that may have missed resets repeats all resets. A ledger that is
    included in a ledger taken over has no further resets, and may come before that one."""

    def __init__(self, directory: Directory, epoch: int, seconds: float) -> None:
        """epoch: of this server. seconds: how long to wait for ledgers, and then for segments."""
        self._directory, self._epoch, self._seconds = directory, epoch, seconds
        self.until = time.monotonic() + seconds
        self._heard = {epoch}
        """The epochs of this server, and of the servers whose ledgers its own ledger includes."""
        self._forgotten = False
        self._reading = False
        """Whether the backlog reads a ledger. Another one waits for its end."""
        self._judges_at = 0.0
        """When to stop waiting for a later server's ledger; 0: no client is waiting for one."""

    def hear(self, fd: int) -> bool:
        """Read an earlier server's ledger, which a client brings. False if the ledger of a later
        server may settle what is missing: ask again soon, and do not serve the client until then.
        OSError if this process has no descriptor left: the client may bring the ledger again."""
        try:
            ledger = EarlierLedger(fd)
        except OSError as error:
            if processes.is_exhausted(error):
                raise
            log.warning("a client sent an fd that is not a server's ledger: %s", error)
            return True
        keep = False
        try:
            if ledger.epoch in self._heard:
                return True
            if self._reading:
                return False
            now = time.monotonic()
            if now <= self.until and ledger.take_over(self._epoch):
                keep = self._reading = True
                self._directory.backlog.begin(self._restore(ledger))
            elif now <= self.until and not self._forgotten and self._waits(now):
                return False
            else:
                self._resets_forgotten()
        finally:
            if not keep:
                ledger.close()
        return not self._reading

    def _waits(self, now: float) -> bool:
        """Whether a later server's ledger may still come."""
        self._judges_at = self._judges_at or now + min(HEIR_SECONDS, self._seconds)
        return now < self._judges_at

    def _restore(self, ledger: EarlierLedger) -> Steps:
        """Read a ledger and take its pool over, in the backlog. Never raises."""
        try:
            yield from self._steps(ledger)
        except (OSError, Damaged, ValueError) as error:
            log.error("ledger: %s; nothing of that server's pool is used", error)
            self._resets_forgotten()
        finally:
            self._reading = False
            ledger.close()

    def _steps(self, ledger: EarlierLedger) -> Steps:
        state = LedgerState()
        yield from ledger.read(state)
        segments = state.segments.keys() | self._directory.segments.keys()
        if len(segments) > MAX_SEGMENTS:
            raise Damaged(f"{len(segments):,} segments in all; {MAX_SEGMENTS} is the limit")
        if len(state.held) > MAX_HELD:
            raise Damaged(f"{len(state.held):,} reservations; {MAX_HELD:,} is the limit")
        if not ledger.same_pids:
            state.hide_processes()
        state.servers = [*state.servers, ledger.epoch][-MAX_SERVERS:]
        yield from self._directory.restore(state)
        self._heard |= set(state.servers)
        self.until = time.monotonic() + self._seconds
        self._judges_at = 0.0
        if state.segments:
            said = "ledger: %d chunks in %d segments are back once their workers offer them again"
            log.warning(said, len(state.chunks), len(state.segments))

    def _resets_forgotten(self) -> None:
        """Repeat all resets, since resets of an earlier server may be missing here."""
        if not self._forgotten:
            self._forgotten = True
            log.warning(
                "a client knew an earlier server of which nothing is known here: resets may be "
                "missing, so what is in KV caches and in the offload tier is not found any more"
            )
            self._directory.raise_epoch(b"")
