"""A worker's loads, which run beside the model."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch

from vcache_backend.errors import MAX_LINE_CHARS, printable
from vcache_backend.transfer import load as transfer
from vcache_backend.vram_pool.copies.copier import NOTHING

from ..ends import EndRing
from ..metadata import LoadSpan, LoadSpec, StepMetadata
from ..telemetry.stats import Meter
from .loading import Attached, Loading
from .report import Reporter
from .stores import Stores

log = logging.getLogger("vllm.vcache")

IDLE_SECONDS, COPY_SECONDS = 0.002, 0.02
"""How long a step without a model run waits for a load's progress, and for the end of a load whose
last copy is under way.

vLLM sleeps after each such step. If the step sees the load's end, the request saves a step and a
sleep. A request that arrives meanwhile waits as long."""


class Ends(NamedTuple):
    """Loads that are over, as requests. failed: those that vLLM computes from the start: loads that
    never began and, with several block tables, all failed loads. invalid: the blocks (vLLM's
    numbers) that all other failed loads have not filled; vLLM keeps the blocks before them."""

    over: set[str]
    failed: set[str]
    invalid: set[int]


class Loads:
    """Runs a worker's loads, in its main thread, in the order of vLLM's steps."""

    def __init__(
        self, block_size: int, several: bool, report: Reporter, stores: Stores, meter: Meter
    ) -> None:
        """block_size: in tokens. several: report failed loads by request, since with several block
        tables vLLM cannot tell which request owns a block."""
        self.at_once = False
        """Loads do not wait for the steps under way (`compat.loads_at_once`)."""
        self._ends = EndRing(report.number)
        self._block_size, self._several = block_size, several
        self._report = report
        self._stores = stores
        self._meter = meter
        self._under_way: list[Loading] = []
        self._lost: list[LoadSpec] = []
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._over: list[str] = []
        """The request of each load that is over, until the load is reported."""
        self._uncounted: list[tuple[Loading, int]] = []
        """Finished loads, and the time of each end (nanoseconds of the wall clock)."""

    # ---- a step

    def begin(self, worker: Attached | None, meta: StepMetadata) -> None:
        """Begin the loads of a step. Cancel earlier loads whose requests have ended. worker: None
        while vLLM sleeps: the loads fail."""
        if meta.loads:
            self._ends.open(meta.ends)
        if worker is None:
            self._lost += meta.loads
        elif meta.loads:
            mark = worker.session.copier.mark() if not self.at_once else NOTHING
            self._under_way += [Loading(worker, spec, mark) for spec in meta.loads]
        for loading in self._under_way:
            if loading.spec.request_id in meta.cancelled:
                loading.cancel()
        if self.at_once:
            # Loads may end while the step is being launched.
            self._advance()

    def ends(self, idle: bool) -> Ends:
        """Advance all loads. Returns the loads that are over, each once.

        idle: the step runs no model, so it waits for a load to end, within bounds."""
        self._advance()
        self._give_up()
        began = time.monotonic()
        while idle and self._under_way and not self._over:
            first = self._under_way[0]
            if time.monotonic() > began + (COPY_SECONDS if first.launched else IDLE_SECONDS):
                break
            first.wait(IDLE_SECONDS)
            self._advance()
        for loading, ended in self._uncounted:
            self._count(loading, ended)
        self._uncounted.clear()
        # A second load of the same request is reported with the next step.
        done = set(self._over)
        for request_id in done:
            self._over.remove(request_id)
        ends = Ends(done, self._failed, self._invalid)
        self._failed, self._invalid = set(), set()
        return ends

    def advance(self) -> None:
        """Advance all loads between two steps, for the scheduler of the same thread. `ends` counts
        finished loads while the next step runs."""
        if self._under_way:
            # In the same mode as the worker's calls.
            with torch.inference_mode():
                self._advance()

    # ---- the end

    def stop(self, deadline: float) -> None:
        """Cancel all loads, and abandon loads that still run at `deadline` (time.monotonic): vLLM
        takes the KV cache's memory away, or ends."""
        for loading in self._under_way:
            loading.cancel()
        for loading in self._under_way:
            loading.end(deadline)
            # vLLM waits for the load's end; its bytes are lost in any case.
            self._lost.append(loading.spec)
        self._under_way.clear()

    # ---- inside

    def _advance(self) -> None:
        for loading in list(self._under_way):
            if loading.advance():
                self._under_way.remove(loading)
                self._end(loading)

    def _give_up(self) -> None:
        """Report loads that never began as failed."""
        while self._lost:
            spec = self._lost.pop()
            self._report.next.failed.add(spec.request_id)
            self._failed.add(spec.request_id)
            self._over.append(spec.request_id)
            self._say(spec, None, time.time_ns())

    def _end(self, loading: Loading) -> None:
        """Report a load that is over."""
        spec, invalid, name = loading.spec, loading.invalid, loading.spec.request_id
        if not loading.cause:
            if spec.promote:
                self._stores.promote(loading)
            self._ends.put(spec.number)
        if invalid:
            self._report.next.failed.add(name)
            if self._several:
                self._failed.add(name)
            else:
                self._invalid |= set(invalid)
        self._over.append(name)
        self._uncounted.append((loading, time.time_ns()))

    def _count(self, loading: Loading, ended: int) -> None:
        """Count a load that is over, and report its span."""
        loading.stats.tell()
        self._say(loading.spec, loading, ended)
        if loading.stats.tokens.total() or not loading.cause:
            self._meter.loaded(loading.stats)
        if loading.cause and loading.cause != transfer.CANCELLED:
            tokens = len(loading.invalid) * self._block_size
            said = "%d tokens of request %s are computed, not loaded: %s"
            name = printable(loading.spec.request_id, MAX_LINE_CHARS)
            log.warning(said, tokens, name, loading.failure)
            self._meter.count("failures", 1, loading.failure)
            self._meter.count("recomputed_tokens", tokens)

    def _say(self, spec: LoadSpec, loading: Loading | None, ended: int) -> None:
        """Add the load's span to the report, if vLLM traces. loading: None if the load never
        began. ended: nanoseconds of the wall clock."""
        if not self._report.traces:
            return
        said: dict[str, Any] = {"vcache.worker": self._report.number}
        began = ended
        if loading is None:
            said["vcache.failure"] = "never began"
        else:
            began, stats = loading.began, loading.stats
            for tier, tokens in stats.tokens.items():
                said[f"vcache.bytes.{tier}"] = tokens * stats.token_bytes
            said["vcache.metadata_seconds"] = stats.metadata_seconds
            said["vcache.data_seconds"] = stats.data_seconds
            if loading.failure:
                said["vcache.failure"] = loading.failure
        self._report.next.spans.append(LoadSpan(spec.request_id, began, ended, said))
