"""A worker's loads, which run beside the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from vcache_backend.errors import MAX_LINE_CHARS, printable
from vcache_backend.transfer import load as transfer
from vcache_backend.vram_pool.copies.copier import NOTHING, Mark

from ..ends import EndRing
from ..metadata import LoadSpan, LoadSpec, MoreBlocks, PublicationSpec, StepMetadata
from ..telemetry.stats import Meter
from .stores import Attached, Stores

log = logging.getLogger("vllm.vcache")

IDLE_SECONDS, COPY_SECONDS = 0.002, 0.02
"""How long a step without a model run waits for a load's progress, and for the end of a load whose
last copy is under way.

vLLM sleeps after each such step. If the step sees the load's end, the request saves a step and a
sleep. A request that arrives meanwhile waits as long."""


class Loading(transfer.Load):
    """The load of one request's blocks."""

    def __init__(self, worker: Attached, spec: LoadSpec, mark: Mark) -> None:
        """mark: a point in the model's stream behind all work of the blocks' earlier owners."""
        session = worker.session
        super().__init__(
            session,
            worker.places(spec.blocks, spec.tokens),
            session.own(spec.chunks.keys),
            mark=mark,
            offload=spec.offload,
            name=spec.request_id,
            runs=spec.residents,
            neighbours=worker.neighbours,
            more=spec.open,
        )
        self.began = time.time_ns()
        self.worker, self.spec = worker, spec

    @property
    def invalid(self) -> list[int]:
        """The blocks (vLLM's numbers) that the finished load has not filled; empty if cancelled."""
        if not self.cause or self.cause == transfer.CANCELLED:
            return []
        return [block for block in self.spec.blocks[self.filled :] if block >= 0]

    @property
    def lost(self) -> int:
        """How many tokens the finished load has not filled."""
        counted = self.spec.blocks[self.filled : self.spec.tokens or None]
        return sum(block >= 0 for block in counted) * self.worker.block_size

    @property
    def failure(self) -> str:
        """The metrics' name for the cause of a failure."""
        absent = "store" if self.spec.offload else "unkept" if self.spec.open else "changed"
        return absent if self.cause == transfer.ABSENT else self.cause

    @property
    def attributes(self) -> dict[str, Any]:
        """The finished load, for its span."""
        stats = self.stats
        said: dict[str, Any] = {
            f"vcache.bytes.{tier}": nbytes for tier, nbytes in stats.nbytes.items()
        }
        said["vcache.metadata_seconds"] = stats.metadata_seconds
        said["vcache.data_seconds"] = stats.data_seconds
        return said | ({"vcache.failure": self.failure} if self.failure else {})


class Ends(NamedTuple):
    """Loads that are over, as requests."""

    over: set[str]
    failed: set[str]
    """Those that vLLM computes from the start: loads that never began and, with several block
    tables or under VCacheMultiConnector, all failed loads."""
    invalid: set[int]
    """The blocks (vLLM's numbers) that all other failed loads have not filled; vLLM keeps the
    blocks before them."""


class Loads:
    """Runs a worker's loads, in its main thread, in the order of vLLM's steps."""

    def __init__(
        self,
        number: int,
        stores: Stores,
        meter: Meter,
        *,
        at_once: bool = False,
        several: bool = False,
        traced: bool = False,
        publish: Callable[[PublicationSpec], None] = lambda _: None,
    ) -> None:
        """number: of this worker among all workers. at_once: loads do not wait for the steps under
        way (`compat.loads_at_once`), unless a store reads their blocks. several: report failed
        loads by request, since with several block tables vLLM cannot tell which request owns a
        block. traced: vLLM traces. publish: called with the publication of a load that has proved
        all its blocks."""
        self.at_once, self.by_request = at_once, several
        self.waits = True
        """Loads of this step begin behind all work launched so far: a step under way may use their
        blocks, or a store reads them."""
        self.failed = set[str]()
        """Requests with failed loads, for the worker's report, which takes them."""
        self.spans: list[LoadSpan] = []
        """The spans of loads that are over, for the worker's report, which takes them."""
        self._number, self.ring = number, EndRing(number)
        """The ring is of all loads of this worker that have a number."""
        self._traced = traced
        self._stores, self._meter, self._publish = stores, meter, publish
        self._under_way: list[Loading] = []
        self._over: list[tuple[LoadSpec, Loading | None, int]] = []
        """Loads that are over and not yet reported, and the time of each end (nanoseconds of the
        wall clock)."""

    # ---- a step

    @property
    def busy(self) -> bool:
        """Whether a load is under way, or something of one is to be reported or counted."""
        return bool(self._under_way or self._over or self.failed or self.spans)

    def begin(self, worker: Attached | None, meta: StepMetadata) -> None:
        """Begin the loads of a step, and make its work wait for stores that read blocks with a new
        owner. Cancel earlier loads whose requests have ended. worker: None while vLLM sleeps: the
        loads fail."""
        fenced = worker is not None and self._stores.fence(worker, meta)
        self.waits = fenced or not self.at_once
        if meta.loads:
            self.ring.open(meta.ends)
            mark = worker.session.copier.mark() if worker and self.waits else NOTHING
            for spec in meta.loads:
                if worker is None:
                    self._end(spec, None)
                else:
                    self._under_way.append(Loading(worker, spec, mark))
        self._extend(meta.more)
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
        began = time.monotonic()
        while idle and not self._over:
            first = next((one for one in self._under_way if not one.starved), None)
            if first is None or time.monotonic() > began + (
                COPY_SECONDS if first.launched else IDLE_SECONDS
            ):
                break
            first.wait(IDLE_SECONDS)
            self._advance()
        ends, later = Ends(set(), set(), set()), list[tuple[LoadSpec, Loading | None, int]]()
        for over in self._over:
            spec, loading, _ = over
            if spec.request_id in ends.over:
                # A second load of the same request is reported with the next step.
                later.append(over)
                continue
            ends.over.add(spec.request_id)
            invalid = loading.invalid if loading is not None else []
            if loading is None or (invalid and self.by_request):
                ends.failed.add(spec.request_id)
            else:
                ends.invalid.update(invalid)
            if loading is None or invalid:
                self.failed.add(spec.request_id)
            self._count(*over)
        self._over = later
        return ends

    def advance(self, more: Sequence[MoreBlocks], patience: float = 0.001) -> None:
        """Advance all loads between two steps, for the scheduler of the same thread. `ends` counts
        finished loads while the next step runs. more: of open loads. patience: seconds to wait for
        the copies of those that end: mostly a last chunk, of which the request then runs a step
        earlier."""
        if not self._under_way:
            return
        # In the same mode as the worker's calls.
        with torch.inference_mode():
            last = self._extend(more)
            self._advance()
            for loading in last:
                if loading.launched:
                    loading.wait(patience)
            if last:
                self._advance()

    def stop(self, deadline: float) -> None:
        """Cancel all loads, and abandon loads that still run at `deadline` (time.monotonic): vLLM
        takes the KV cache's memory away, or ends."""
        for loading in self._under_way:
            loading.cancel()
        for loading in self._under_way:
            loading.end(deadline)
            # vLLM waits for the load's end; its bytes are lost in any case.
            self._end(loading.spec, None)
        self._under_way.clear()

    # ---- inside

    def _extend(self, more: Iterable[MoreBlocks]) -> list[Loading]:
        """Go on with open loads. Returns those for which nothing follows."""
        last = list[Loading]()
        for one in more:
            for loading in self._under_way:
                if loading.spec.number == one.number:
                    loading.extend(one.residents, one.last)
                    last += [loading] if one.last else []
        return last

    def _advance(self) -> None:
        for loading in list(self._under_way):
            if loading.advance():
                self._under_way.remove(loading)
                self._end(loading.spec, loading)

    def _end(self, spec: LoadSpec, loading: Loading | None) -> None:
        """Note that a load is over. loading: None if it never began, or its bytes are lost."""
        if loading is not None and not loading.cause:
            if spec.promote and (came := loading.to_promote()):
                keys, epoch = loading.keys, loading.epoch
                self._stores.promote(loading.worker, spec, keys, came, epoch)
            if spec.publication is not None:
                self._publish(spec.publication)
            self.ring.put(spec.number)
        self._over.append((spec, loading, time.time_ns()))

    def _count(self, spec: LoadSpec, loading: Loading | None, ended: int) -> None:
        """Count a load that is over, and make its span."""
        if loading is not None:
            loading.stats.tell()
        if self._traced:
            said = {"vcache.failure": "never began"} if loading is None else loading.attributes
            began = ended if loading is None else loading.began
            said = {"vcache.worker": self._number} | said
            self.spans.append(LoadSpan(spec.request_id, began, ended, said))
        if loading is None:
            return
        if loading.stats.tokens.total() or not loading.cause:
            self._meter.loaded(loading.stats)
        if loading.cause and loading.cause != transfer.CANCELLED:
            name, why = printable(spec.request_id, MAX_LINE_CHARS), loading.failure
            line = "%d tokens of request %s are computed, not loaded: %s"
            log.warning(line, loading.lost, name, why)
            self._meter.count("failures", 1, why)
            self._meter.count("recomputed_tokens", loading.lost)
