"""Publishes the blocks of a worker's KV cache that is shared in place, and publishes them again to
a new server."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from contextlib import suppress
from itertools import groupby, pairwise, takewhile
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from vcache_backend.backoff import Backoff
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import (
    HASH_BYTES,
    BlockRun,
    InstanceId,
    Publish,
    ResidentRun,
)
from vcache_backend.resident.mappings import Tables
from vcache_backend.transfer.outbox import Outbox, at_once
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.generations import UInt32s, UInt64s

log = logging.getLogger(__name__)

_BLOCK = np.dtype(
    [
        ("number", "<i8"),
        ("epoch", "<i8"),
        ("generation", "<u8"),
        ("table", "<u4"),
        ("hash", f"V{HASH_BYTES}"),
    ]
)
"""A block as published: a part of a `BlockRun`, and the publication's epoch. `generation`: 0 if the
block was never published."""


class Publisher:
    """Publishes one worker's blocks in the order of submission, each block after the step that
    wrote it.

    Remembers what was published last of each block. If the server loses blocks, unchanged blocks
    are published again."""

    def __init__(
        self,
        client: Client,
        stats: EngineStats,
        instance: InstanceId,
        rank: int,
        blocks: int,
        *,
        most: int = 1024,
        few: int = 64,
        together: float = 0.1,
        retry: float = 1.0,
    ) -> None:
        """blocks: vLLM's number of blocks. most: publications that wait for the end of their step;
        further ones are dropped, and other instances miss the blocks. few: runs of so many blocks,
        which mostly end a prompt, come before the longer ones of their step. together: for how many
        seconds publications that nobody waits for wait for further ones. retry: the first pause
        before everything is published again, since the server refuses until the scheduler has
        shown its generations."""
        self._client, self._stats, self._instance, self._rank = client, stats, instance, rank
        self._published = np.zeros(blocks, dtype=_BLOCK)
        self._waiting: deque[tuple[Mark, Publish]] = deque()
        self._tables = Tables(client)
        self._due = math.inf
        """When to publish all blocks again; infinite while the server has them."""
        self._most, self._few, self._together = most, few, together
        self._pauses = Backoff(retry, 60.0)
        self.outbox = Outbox(stats.failed)
        client.on_return.append(self._returned)
        client.on_beat.append(self._beat)

    def submit(self, runs: list[BlockRun], epoch: int, written: Mark, soon: bool = True) -> None:
        """Queue blocks that can be read once `written` is reached. Any thread; never blocks. epoch:
        see `Publish`. soon: other instances may wait for the blocks; otherwise they are published
        together with those of the next steps."""
        if len(self.outbox) >= self._most:
            self._stats.failed("publication_dropped")
            return
        self._waiting.append((written, Publish(self._instance, self._rank, runs, epoch)))
        within = 0.0 if soon else self._together
        self.outbox.after(written.wait, self._publish_reached, within, self._drop_failed)

    def known(self, blocks: UInt32s, generations: UInt64s) -> npt.NDArray[np.bool_]:
        """Shape of `blocks`: whether each block was last published with this generation. Any
        thread.

        Leaves out blocks of failed steps, which were never published."""
        same: npt.NDArray[np.bool_] = self._published["generation"][blocks] == generations
        return same

    def holds(self, blocks: bytes, generations: bytes) -> bool:
        """Whether all these blocks still have these generations. Both packed as in the protocol.
        Any thread; the first call asks the server."""
        run = ResidentRun(0, blocks, generations, 0, self._instance)
        return self._tables.leading(run) == run.count

    def close(self, timeout: float = 5.0) -> None:
        """See `Outbox.close`."""
        self.outbox.close(timeout)
        for hooks, hook in (
            (self._client.on_return, self._returned),
            (self._client.on_beat, self._beat),
        ):
            if hook in hooks:
                hooks.remove(hook)
        self._tables.close()

    # ---- the client's thread

    def _returned(self) -> None:
        """Publish everything again: the server may be new."""
        self._pauses.reset()
        self._due = 0.0
        self._beat()

    def _beat(self) -> None:
        if time.monotonic() >= self._due:
            self._due = math.inf
            self.outbox.after(at_once, self._publish_again)

    # ---- the outbox's thread

    def _publish_reached(self) -> None:
        """Publish what the steps up to the first one that is not over have written."""
        reached = list[Publish]()
        with suppress(VCacheError):  # of a failed step, whose own call drops it
            while self._waiting and self._waiting[0][0].reached():
                reached.append(self._waiting.popleft()[1])
        for epoch, group in groupby(reached, key=attrgetter("epoch")):
            runs = [run for one in group for run in sorted(one.runs, key=lambda run: run.count)]
            few = list(takewhile(lambda run: run.count <= self._few, runs))
            for part in (few, runs[len(few) :]):
                if part:
                    self._publish(Publish(self._instance, self._rank, part, epoch))

    def _drop_failed(self, error: Exception) -> None:
        """Drop the next publication if nobody can know whether its step is over."""
        try:
            if self._waiting:
                self._waiting[0][0].reached()
        except Exception:  # noqa: BLE001 - the call that failed has said so
            self._waiting.popleft()

    def _publish(self, publication: Publish) -> None:
        told = bool(self._tell(publication))
        # Others wait for the blocks, and vLLM for the interpreter, as the step has just ended.
        for run in publication.runs:
            self._remember(run, publication.epoch)
        if told != (self._due == math.inf):
            # The server is gone, or the scheduler has not shown the generations yet. Or the server
            # takes blocks now, and the pause may have grown long.
            self._pauses.reset()
            self._pause()

    def _remember(self, run: BlockRun, epoch: int) -> None:
        here = np.zeros(run.count, dtype=_BLOCK)
        here["epoch"], here["table"] = epoch, run.table
        here["number"] = np.arange(run.first, run.first + run.count)
        here["hash"] = np.frombuffer(run.hashes, dtype=_BLOCK["hash"])
        here["generation"] = np.frombuffer(run.generations, dtype="<u8")
        self._published[np.frombuffer(run.blocks, dtype="<u4")] = here

    def _publish_again(self) -> None:
        """Publish all unchanged blocks."""
        taken = False
        try:
            taken = self._tell_all()
        finally:
            if not taken:
                self._pause()

    def _pause(self) -> None:
        self._due = min(self._due, time.monotonic() + self._pauses.next())

    def _tell(self, publication: Publish) -> int | None:
        """Publish blocks. Returns how many the server took, 0 after a refusal; None if the server
        is unavailable."""
        try:
            taken = self._client.publish(publication)
        except VCacheError as error:
            log.debug("publish: %s", error)
            self._stats.failed("publish")
            return None if isinstance(error, ServerUnavailable) else 0
        self._stats.count(blocks_published=taken)
        return taken

    def _tell_all(self) -> bool:
        """Returns whether the server has the blocks: it took some, or none are left."""
        view = self._tables.view(self._instance)
        if view is None or not self._client.connected:
            return False
        generations = self._published["generation"]
        generations[generations != view.counters] = 0
        total, runs = 0, self._runs()
        for epoch, group in groupby(runs, key=itemgetter(0)):
            publication = Publish(self._instance, self._rank, [run for _, run in group], epoch)
            if self.outbox.stopping or (taken := self._tell(publication)) is None:
                return False
            total += taken
        return bool(total) or not runs

    def _runs(self) -> list[tuple[int, BlockRun]]:
        """The published blocks as runs, in about their old order, each with its epoch."""
        blocks = np.flatnonzero(self._published["generation"])
        known = self._published[blocks]
        order = np.lexsort((known["number"], known["table"], known["generation"]))
        blocks, known = blocks[order], known[order]
        # A run that lost blocks, or has blocks of several fills, is now several runs.
        follows = np.diff(known["number"]) == 1
        for name in ("generation", "table", "epoch"):
            follows &= np.diff(known[name]) == 0
        starts = [0, *(np.flatnonzero(~follows) + 1).tolist()] if len(blocks) else []
        runs = list[tuple[int, BlockRun]]()
        for first, stop in pairwise([*starts, len(blocks)]):
            part = known[first:stop]
            number, epoch, _, table, _ = known[first].tolist()
            packs = blocks[first:stop].astype("<u4").tobytes(), part["generation"].tobytes()
            runs.append((epoch, BlockRun(number, *packs, table, part["hash"].tobytes())))
        return runs
