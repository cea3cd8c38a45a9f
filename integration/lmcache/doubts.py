"""Keeps KV out of the pool that vLLM may have computed from wrong KV: from blocks of a failed load,
or from before a reset.

LMCache loads KV in the step that computes with this KV, and stores in the same step. vLLM hears of
a failure in a worker when the step is over, and may have planned further steps by then. So stores
of steps with a load, and of the next steps, are committed when the scheduler says that all workers'
loads have succeeded. After a failure or a reset the scheduler follows the blocks that may be wrong.
It asks the workers for a reset by a look-up, LMCache's only way to them. Imports neither vLLM nor
LMCache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple

from ..doubts import Doubts, Rows, beginning
from .boundary import SCHEDULER

log = logging.getLogger(__name__)

MOST_SECONDS, PAUSE_SECONDS = 5.0, 0.02
"""How long a store waits for the scheduler's word, which comes with a later step, and how often it
checks."""


RESET = "vcache.reset"
"""The name of a look-up that asks the workers to reset, and of its entry in `request_configs`."""
NOT_RESET, WAS_RESET = 1, 2
"""A worker's answers. LMCache returns the least answer; a worker without the plugin answers 0."""


class Word(NamedTuple):
    """The scheduler's message to the workers in each step, `vcache` in LMCache's metadata.

    failures: how many steps with a failed load are known. doubtful: the requests of which nothing
    may be stored; None: all. resets: how many resets were asked for. number: of the step. results:
    how many steps' results are known."""

    failures: int = 0
    doubtful: frozenset[str] | None = None
    resets: int = 0
    number: int = 0
    results: int = 0


class LMCacheDoubts(Doubts):
    """Follows doubtful blocks by wrapping calls of LMCache's connector, through `SCHEDULER` (see
    `boundary`). While `everything` is doubtful, nothing is loaded, either."""

    def __init__(self, connector: Any) -> None:
        super().__init__()
        self._adapter = adapter = connector._lmcache_engine
        self._steps, self._results = 0, 0
        self._failures, self._resets = 0, 0
        self._last = False
        """A reset was made, and no step has run since."""
        adapter.build_connector_meta = SCHEDULER.around(
            adapter.build_connector_meta, self._planned, self._tell, after_off=_tell_nothing
        )
        connector.update_connector_output = SCHEDULER.around(
            connector.update_connector_output, self._hear, before_off=self._evict_all
        )
        connector.bind_gpu_block_pool = partial(SCHEDULER.run, self._watch)
        connector.reset_cache = partial(SCHEDULER.run, self._reset_cache, nothing=False)
        connector.weights_change = partial(SCHEDULER.run, self._weights_change)
        connector.weights_are = lambda name: None

    def _weights_change(self) -> None:
        """vLLM is about to change the weights, see `versions.watch`. A reset may have come just
        before, as with a pause."""
        if not self.everything and not self._last:
            log.warning("vcache: vLLM's weights change: nothing is shared until the next reset")
            self.everything = True

    def _reset_cache(self) -> bool:
        """Reset the namespace, see `connector.reset_cache`, and doubt vLLM's present KV. After a
        failure nothing is shared."""
        self.everything = True
        client = self._adapter.lookup_client
        if client is None:
            return True
        self._resets += 1
        for request_id in list(getattr(client, "reqs_status", ())):
            client.clear_lookup_status(request_id)
        chunk = [0] * self._adapter._lmcache_chunk_size
        try:
            answer = client.lookup(chunk, RESET, {RESET: True})
        except Exception:  # LMCache's
            log.exception("vcache: the pool was not reset, so nothing is shared")
            return False
        # If a worker has not answered in time, LMCache returns 0 and keeps no answer.
        answered = client.lookup_cache(RESET) != -1
        client.clear_lookup_status(RESET)
        if answer == WAS_RESET:
            self.reset()
            self._last = True
        return bool(answered and answer != NOT_RESET)

    def _watch(self, pool: Any) -> None:
        from ..vllm.in_place.block_pool import KVBlocks  # numpy, which few processes need

        self.watch(KVBlocks(pool, lambda reason, error: SCHEDULER.give_up(reason, error)))

    def _hear(self, connector_output: Any) -> None:
        """Learn which loads have failed. Later requests do not find the loads' blocks."""
        self._results += 1
        if invalid := connector_output.invalid_block_ids:
            self._failures += 1
            self.add(invalid)
            self.spread([*filter(None, map(self._rows, self._adapter._request_trackers))])
            assert self.pool is not None, "vLLM has not shown its block pool"
            self.pool.evict(set(self._until))

    def _evict_all(self, connector_output: Any) -> None:
        """Take all blocks out of vLLM's prefix cache after a failed load: which of them are wrong
        is not known any more."""
        if connector_output.invalid_block_ids and self.pool is not None:
            self.pool.evict(self.pool.held)

    def _planned(self, scheduler_output: Any) -> None:
        """Follow the step's blocks, before LMCache plans its part."""
        self.follow(scheduler_output, beginning(scheduler_output), self._rows)

    def _tell(self, meta: Any, scheduler_output: Any) -> None:
        """Add our message to the step's metadata."""
        self._last &= not scheduler_output.total_num_scheduled_tokens
        if not self.everything:
            names = self._adapter._request_trackers if self._until else ()
            doubtful = frozenset(name for name in names if self.until(self._rows(name)))
            counts = self._resets, self._steps, self._results
            meta.vcache = Word(self._failures, doubtful, *counts)
        self._steps += 1

    def _rows(self, request: str) -> Rows | None:
        tracker = self._adapter._request_trackers.get(request)
        return None if tracker is None else [tracker.allocated_block_ids]


def _tell_nothing(meta: Any, _: Any) -> None:
    """Have the workers store nothing."""
    meta.vcache = Word()


class Steps:
    """Counts a worker's steps, to know which steps the scheduler's word covers. In the worker's
    main thread, except the result of `confirms`."""

    def __init__(self, adapter: Any, closed: Callable[[], bool]) -> None:
        """adapter: LMCache's. closed: whether stores have ended."""
        self._adapter, self._closed = adapter, closed
        self._number, self._failures, self._results = 0, 0, 0
        self._mute = 0
        """How many steps came without the scheduler's word."""
        self._last_load = -inf
        self.resets = 0
        """How many resets this worker was asked for."""

    def loads(self) -> None:
        """Note that this step has a load."""
        self._last_load = self._number

    def over(self) -> None:
        """End a step."""
        word = self._word
        self._failures = max(self._failures, word.failures)
        self._results = max(self._results, word.results)
        self._mute += word.doubtful is None
        self._number += 1

    def doubts(self, request: str | None) -> bool:
        """Whether the request may have computed from wrong blocks."""
        word = self._word
        return word.doubtful is None or request in word.doubtful or word.resets < self.resets

    def confirms(self) -> Callable[[], bool | None] | None:
        """Return a function that says whether this step's stores may be committed, see
        `PendingStore.holds`. None: they may, since no load can have failed."""
        step, word, vllm = self._number, self._word, self._adapter._vllm_config
        mute = self._mute
        # vLLM plans `depth` steps before it has the first step's result.
        depth = getattr(
            vllm, "max_concurrent_batches", vllm.parallel_config.pipeline_parallel_size + 1
        )
        if step > self._last_load + depth:
            return None
        until = monotonic() + MOST_SECONDS

        def holds() -> bool | None:
            if self._mute != mute:
                return False  # whether a load has failed is not known
            late = self._number > step + depth
            if late or self._results > word.number or self._failures > word.failures:
                return self._failures == word.failures
            if self._closed() or monotonic() > until:
                return False
            sleep(PAUSE_SECONDS)
            return None

        return holds

    @property
    def _word(self) -> Word:
        return getattr(self._adapter._parent._connector_metadata, "vcache", None) or Word()
