"""One life of a server after another: what this one may believe of the one before it, and what it leaves to the next."""

from __future__ import annotations

import logging
import os
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path

from vcache_backend.errors import ConfigError, raising_as
from vcache_backend.metadata_server import journal as journals
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.journal import NEVER, Journal, Witness
from vcache_backend.metadata_server.records import JournalState

log = logging.getLogger(__name__)


def inherit(path: Path, believed: bool) -> JournalState:
    """What the journal at `path` says; an empty state if it is damaged, which is kept aside, or not to be `believed`.

    ConfigError if it cannot be used, or if who writes it still lives: no two servers may use the same segments."""
    with raising_as({OSError: ConfigError}, f"server.journal: cannot use {path}"):
        writer = journals.writer(path)
        if writer not in (None, processes.identity(os.getpid())) and processes.lives(writer):
            raise ConfigError(f"server.socket: pid {writer.pid} still serves, it writes {path}; stop it, or use another socket")
        try:
            return journals.read(path) if believed else JournalState()
        except journals.Damaged as damage:
            aside = path.with_name(path.name + ".damaged")
            path.replace(aside)
            log.error("journal %s is damaged: %s; starting empty, the file is kept as %s", path, damage, aside)
            return JournalState()


def first_id(taken: Iterable[int]) -> int:
    """From where ids can count up without meeting any of `taken`, or of another life of the server."""
    while True:
        first = 1 + secrets.randbits(62)
        if not any(first <= id_ < first + (1 << 48) for id_ in taken):
            return first


class Predecessor:
    """What clients' witnesses tell of the servers before this one, and what follows: memory that no proven journal knows is never used
    again, and a server that has forgotten resets makes them all once more."""

    def __init__(self, directory: Directory, state: JournalState, ours: int) -> None:
        """`state`: what the directory was restored from. `ours`: this server's epoch."""
        self._directory = directory
        self._epoch, self._frame, self._ours = state.epoch, state.frame, ours
        self.proven = False
        """Whether the journal is known to be the last word of the server before."""
        self._forgotten = False

    def hear(self, fd: int) -> None:
        """A client brings the witness of the server that it knew before. The first one that proves the journal is ended; one of this
        server's own epoch, as those of clients that come back have, says nothing."""
        try:
            epoch, frame = journals.read_witness(fd)
        except (OSError, struct.error) as error:
            log.warning("a client brought a witness that is none: %s", error)
            return
        if epoch not in (self._epoch, self._ours):
            self._resets_forgotten()
        if self.proven or epoch != self._epoch:
            return
        if frame <= self._frame:
            journals.end_witness(fd)
            self.proven = True
            return
        self._resets_forgotten()
        if absent := self._directory.absent_segments():
            lost = self._directory.forget_absent(absent)
            came = "given up, or taken over by another server since" if frame == NEVER else f"at frame {frame}"
            refuted = f"it ends at frame {self._frame}, but was {came}"
            log.error("journal: %s; %d chunks in %d segments are lost, fresh memory is used", refuted, lost, len(absent))

    def _resets_forgotten(self) -> None:
        """The journal does not say all, resets perhaps among it."""
        if not self._forgotten:
            self._forgotten = True
            self._directory.raise_epoch(b"")


class Legacy:
    """What the next server will find: the journal, as long as it can be written, and the witness of how far it came."""

    def __init__(self, path: Path, keep: bool, epoch: int, directory: Directory, state: JournalState) -> None:
        """Write the `state` that the directory starts from. Without `keep` there is no journal, and no old one stays. ConfigError."""
        self._directory = directory
        self._journal: Journal | None = None
        self.witness = Witness(epoch)
        try:
            with raising_as({OSError: ConfigError}, f"server.journal: cannot use {path}"):
                if keep:
                    self._journal = Journal(path, epoch, processes.identity(os.getpid()))
                    self._journal.start(state.records())
                    self.witness.reached(self._journal.frame)
                else:
                    path.unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    def write(self) -> None:
        """What happened since the last time; answers may leave after this. Where it cannot be written a restart will be cold."""
        records = self._directory.records
        if self._journal is not None:
            try:
                if records:
                    self._journal.append(records)
                self._journal.compact(self._directory.still)
                self.witness.reached(self._journal.frame)
            except (OSError, journals.Damaged) as error:
                log.error("journal: %s; going on without one, a restart will be cold", error)
                self.witness.reached(NEVER)
                self._journal.abandon()
                self._journal = None
        records.clear()

    def close(self) -> None:
        self.witness.close()
        if self._journal is not None:
            self._journal.close()
