"""Keeps out of the pool what vLLM may have computed from KV that a failed load has not brought.

LMCache loads in the step that computes with what it loads, and stores in that step, too. A failure
in one worker vLLM hears of when that step is over, and by then further steps may be planned. So
stores of steps with a load, and of the next ones, are committed when the scheduler says that all
workers' loads have succeeded. After a failure the scheduler follows the blocks that may be wrong.
Imports neither vLLM nor LMCache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

MOST_SECONDS, PAUSE_SECONDS = 5.0, 0.02
"""How long a store waits for the scheduler's word, which comes with a later step, and how often it
looks."""


class Word(NamedTuple):
    """What the scheduler says to the workers in each step, as `vcache` in LMCache's metadata.

    failures: how many steps with a failed load it has heard of. doubtful: the requests of which
    nothing may be stored; None: all."""

    failures: int = 0
    doubtful: frozenset[str] | None = None


class Doubts:
    """Follows the blocks that may be wrong. Wraps calls of LMCache's connector, in the scheduler's
    thread. LMCache's own results and exceptions come through.

    everything: nothing is loaded or stored any more."""

    def __init__(self, connector: Any) -> None:
        adapter = connector._lmcache_engine
        self._trackers = adapter._request_trackers
        self._failures, self.everything = 0, False
        self._blocks = set[int]()
        """vLLM's numbers of the blocks that may be wrong."""
        self._evict: Callable[[set[int]], None] = lambda blocks: None
        self._build, self._update = adapter.build_connector_meta, connector.update_connector_output
        adapter.build_connector_meta = self._build_connector_meta
        connector.update_connector_output = self._update_connector_output
        connector.bind_gpu_block_pool = self._watch
        connector.weights_change, connector.weights_are = self._weights_change, lambda name: None

    def _weights_change(self) -> None:
        """vLLM is about to change the weights, see `versions.watch`."""
        if not self.everything:
            said = "nothing is shared until vLLM is started again"
            log.warning("vcache: vLLM's weights change: %s", said)
        self.everything = True

    def _watch(self, pool: Any) -> None:
        """Have vLLM's `pool` say which blocks it hands out: their next owners write them."""
        take = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            blocks = take(num_blocks)
            if self._blocks:
                self._blocks.difference_update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks, self._evict = get_new_blocks, pool.evict_blocks

    def _update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads have failed. Later requests do not find their blocks."""
        try:
            if invalid := connector_output.invalid_block_ids:
                self._failures += 1
                self._blocks |= invalid
                self._spread(self._trackers)
                self._evict(self._blocks)
        except Exception:  # vLLM goes on
            self.everything = True
            log.exception("vcache: which blocks are wrong is not known, so nothing is shared")
        self._update(connector_output)

    def _build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = self._build(scheduler_output)
        if not self.everything:
            doubtful = self._spread(scheduler_output.num_scheduled_tokens)
            meta.vcache = Word(self._failures, frozenset(doubtful))
        return meta

    def _spread(self, names: Iterable[str]) -> set[str]:
        """Note also the blocks of these requests behind a wrong one. Returns the requests that have
        one."""
        found = set[str]()
        while self._blocks:
            before = len(found)
            for name in names:
                tracker = self._trackers.get(name) if name not in found else None
                row = tracker.allocated_block_ids if tracker is not None else ()
                wrong = next((at for at, block in enumerate(row) if block in self._blocks), -1)
                if wrong >= 0:
                    found.add(name)
                    self._blocks.update(row[wrong:])
            if len(found) == before:
                break
        return found


class Steps:
    """Counts a worker's steps, to know which of them the scheduler's word covers. In the worker's
    main thread, except what `confirms` returns."""

    def __init__(self, adapter: Any, closed: Callable[[], bool]) -> None:
        """adapter: LMCache's. closed: whether nothing is stored any more."""
        self._adapter, self._closed = adapter, closed
        self._number, self._failures = 0, 0
        self._last_load = -inf

    def loads(self) -> None:
        """Note that this step has a load."""
        self._last_load = self._number

    def over(self) -> None:
        """End a step."""
        self._failures = max(self._failures, self._word.failures)
        self._number += 1

    def doubts(self, request: str | None) -> bool:
        """Whether the request may have computed from wrong blocks."""
        doubtful = self._word.doubtful
        return doubtful is None or request in doubtful

    def confirms(self) -> Callable[[], bool | None] | None:
        """Return what says whether this step's stores may be committed, see `PendingStore.holds`.
        None: they may, for no load can have failed."""
        step, failures, vllm = self._number, self._word.failures, self._adapter._vllm_config
        # So many steps vLLM plans before it has the result of the first one.
        depth = getattr(
            vllm, "max_concurrent_batches", vllm.parallel_config.pipeline_parallel_size + 1
        )
        if step > self._last_load + depth:
            return None
        until = monotonic() + MOST_SECONDS

        def holds() -> bool | None:
            if self._number > step + depth or self._failures > failures:
                return self._failures == failures
            if self._closed() or monotonic() > until:
                return False
            sleep(PAUSE_SECONDS)
            return None

        return holds

    @property
    def _word(self) -> Word:
        return getattr(self._adapter._parent._connector_metadata, "vcache", None) or Word()
