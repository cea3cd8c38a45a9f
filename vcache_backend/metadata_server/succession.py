"""Takes over the pools of earlier servers, from the ledgers that clients bring."""

from __future__ import annotations

import logging
import time

from vcache_backend.metadata_server.ledger import Damaged, EarlierLedger
from vcache_backend.metadata_server.pool.directory import Directory

log = logging.getLogger(__name__)

MOST_SERVERS = 256
"""How many earlier servers a ledger names, the latest ones."""


class Predecessors:
    """Takes over the ledgers of earlier servers, in any order.

    A ledger is the whole truth about its segments once its server has ended, as long as no server
    has taken it over: no other server gave out their slots. Memory in no such ledger is never used
    again. A server that may have missed resets repeats all of them. A ledger that is in one of
    those taken over tells of no other resets."""

    def __init__(self, directory: Directory, epoch: int, seconds: float) -> None:
        """epoch: this server's. seconds: how long to wait for ledgers, and then for segments."""
        self._directory, self._epoch, self._seconds = directory, epoch, seconds
        self.until = time.monotonic() + seconds
        self._heard = {epoch}
        """The servers whose ledgers are in this server's, and this server, by their epochs."""
        self._doubted = set[int]()
        """Earlier servers whose resets may be missing here."""
        self._before, self._raised = dict[bytes, int](), dict[bytes, int]()
        """The namespaces' epochs before and after they were raised for the first of these."""

    def hear(self, fd: int) -> None:
        """Read the ledger that a client brings of its previous server."""
        try:
            ledger = EarlierLedger(fd)
        except OSError as error:
            log.warning("a client sent an fd that is no ledger of a server: %s", error)
            return
        try:
            if ledger.epoch in self._heard:
                return
            if time.monotonic() > self.until or not ledger.take_over(self._epoch):
                self._doubt(ledger.epoch)
                return
            self._restore(ledger)
        except (OSError, Damaged) as error:
            log.error("ledger: %s; nothing of that server's pool is used", error)
            self._doubt(ledger.epoch)
        finally:
            ledger.close()

    def _restore(self, ledger: EarlierLedger) -> None:
        state = ledger.read()
        if not ledger.same_pids:
            state.hide_processes()
        state.servers = [*state.servers, ledger.epoch][-MOST_SERVERS:]
        self._heard |= set(state.servers)
        self._trust_again()
        self._directory.restore(state)
        self.until = time.monotonic() + self._seconds
        if state.segments:
            log.warning(
                "ledger: %d chunks in %d segments are back once their workers offer them again; "
                "segments of `vcache segment add` that nobody has mapped are lost: add them again",
                len(state.chunks),
                len(state.segments),
            )

    def _doubt(self, server: int) -> None:
        """Repeat all resets, since resets of this earlier server may be missing here."""
        epochs = self._directory.epochs
        if not self._doubted:
            log.warning(
                "a client knew an earlier server of which nothing is known here: resets may be "
                "missing, so what is in KV caches and in the offload tier is not found any more"
            )
            self._before = epochs.all()
            self._directory.raise_epoch(b"")
            self._raised = epochs.all()
        self._doubted.add(server)

    def _trust_again(self) -> None:
        """Go back to the epochs of before the doubts, if the ledger that has just come contains
        those of all doubted servers. Not after a reset since then."""
        epochs = self._directory.epochs
        if self._doubted and self._doubted <= self._heard and epochs.all() == self._raised:
            log.warning("the missing ledger has come: what was computed before is found again")
            # What was published since then belongs to the epochs that go.
            self._directory.residents.clear(b"")
            epochs.restore(self._before)
            self._doubted.clear()
