"""From one life of the server to the next: what it may believe of its predecessor, and what it
leaves to its successor.
"""

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
    """Read the journal at `path`. An empty state if it is damaged (the file is kept under another
    name), or not to be `believed`.

    ConfigError if it cannot be used, or if its writer still runs: two servers must not use the same
    segments."""
    with raising_as({OSError: ConfigError}, f"server.journal: cannot use {path}"):
        writer = journals.writer(path)
        if writer not in (None, processes.identity(os.getpid())) and processes.lives(writer):
            raise ConfigError(
                f"server.socket: pid {writer.pid} still serves, it writes {path}; stop it, or use another socket"
            )
        try:
            return journals.read(path) if believed else JournalState()
        except journals.Damaged as damage:
            aside = path.with_name(path.name + ".damaged")
            path.replace(aside)
            log.error(
                "journal %s is damaged: %s; starting empty, the file is kept as %s",
                path,
                damage,
                aside,
            )
            return JournalState()


def first_id(taken: Iterable[int]) -> int:
    """A number from which ids can count up without meeting any of `taken`, or those of another life
    of the server.
    """
    while True:
        first = 1 + secrets.randbits(62)
        if not any(first <= id_ < first + (1 << 48) for id_ in taken):
            return first


class Predecessor:
    """What clients' witnesses tell of earlier servers, and what follows from it.

    Memory that no proven journal knows is never used again. A server that may have forgotten resets
    makes all of them once more."""

    def __init__(self, directory: Directory, state: JournalState, ours: int) -> None:
        """state: what the directory was restored from. ours: this server's epoch."""
        self._directory = directory
        self._epoch, self._frame, self._ours = state.epoch, state.frame, ours
        self.proven = False
        """Whether the journal is known to be the last word of the server before."""
        self._forgotten = False

    def hear(self, fd: int) -> None:
        """Read the witness, brought by a client, of the server that it was connected to before.

        The first one that proves the journal is ended. One of this server's own epoch says nothing:
        clients that come back bring those."""
        try:
            epoch, frame = journals.read_witness(fd)
        except (OSError, struct.error) as error:
            log.warning("a client sent an fd that is no witness of a server: %s", error)
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
            came = (
                "given up, or taken over by another server since"
                if frame == NEVER
                else f"at frame {frame}"
            )
            refuted = f"it ends at frame {self._frame}, but was {came}"
            log.error(
                "journal: %s; %d chunks in %d segments are lost, fresh memory is used",
                refuted,
                lost,
                len(absent),
            )

    def _resets_forgotten(self) -> None:
        """The journal is not complete, and resets may be missing from it: make all of them once
        more.
        """
        if not self._forgotten:
            self._forgotten = True
            self._directory.raise_epoch(b"")


class Legacy:
    """What the next server will find: the journal, as long as it can be written, and the witness of
    how far it came.
    """

    def __init__(
        self, path: Path, keep: bool, epoch: int, directory: Directory, state: JournalState
    ) -> None:
        """Write the `state` that the directory starts from. Without `keep` there is no journal, and
        an old one is removed. ConfigError.
        """
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
        """Write what has happened since the last call; answers may leave after this. If it cannot
        be written, a restart will be cold.
        """
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
