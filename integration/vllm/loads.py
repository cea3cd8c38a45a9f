"""A worker's loads: an asynchronous one runs beside the model until it is over, a synchronous one
is part of its step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from vcache_backend.transfer import load as transfer

from .loading import Attached, Loading, unpacked
from .metadata import LoadSpan, LoadSpec, StepMetadata
from .model_spec import ModelSpec
from .report import Reporter
from .stats import Meter
from .stores import Stores

log = logging.getLogger("vllm.vcache")

IDLE_SECONDS = 0.002
"""How long a step without a model run waits for a load. A request that arrives meanwhile waits as
long.
"""
SYNCHRONOUS_SECONDS = 30.0
"""How long a step waits for a load that it needs, at most. A copy takes a thousandth of that."""


class Loads:
    """All loads of one worker. In its main thread, in the order of vLLM's steps.

    unsafe: why the tokens of the last step may be wrong in a way that vLLM would not mend; empty if
    they are right."""

    def __init__(
        self, model: ModelSpec, several: bool, report: Reporter, stores: Stores, meter: Meter
    ) -> None:
        """several: report failed loads by request, since with several block tables vLLM cannot tell
        whose the blocks are.
        """
        self._model, self._several, self._report, self._stores, self._meter = (
            model,
            several,
            report,
            stores,
            meter,
        )
        self._asynchronous: list[Loading] = []
        self._synchronous: list[Loading] = []
        self._lost: list[LoadSpec] = []
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self.unsafe = ""

    # ---- a step

    def expect(self, specs: Iterable[LoadSpec]) -> None:
        """The step wants these loads. From here on each one's end is reported, whatever happens:
        vLLM waits for it or counts on it.
        """
        self._lost += specs

    def begin(self, worker: Attached, meta: StepMetadata) -> None:
        """Begin the loads that were `expect`ed, and pass on what the step says about earlier ones:
        chunks found, and cancellations.
        """
        specs = [spec for spec in meta.loads if not spec.lost]
        mark = worker.session.copier.mark() if specs else None
        for spec in specs:
            assert mark is not None
            loading = Loading(
                worker, spec, mark, 0.0 if self._model.recomputes else SYNCHRONOUS_SECONDS
            )
            (self._synchronous if spec.synchronous else self._asynchronous).append(loading)
            self._lost.remove(spec)
        for loading in self._asynchronous:
            if loading.spec.request_id in meta.found:
                loading.found(unpacked(meta.found[loading.spec.request_id]))
            if loading.spec.request_id in meta.cancelled:
                loading.cancel()

    def begin_copies(self) -> None:
        """Launch the copies of the synchronous loads before vLLM asks for them."""
        for loading in self._synchronous:
            loading.advance()

    def follow(self) -> None:
        """Launch the step's synchronous loads, and make the model's stream wait for them."""
        for loading in self._synchronous:
            # A load that was launched ahead needs no second look here: `settle` asks for its
            # verdict.
            if not loading.launched:
                loading.advance()
            loading.follow()

    def settle(self) -> None:
        """Wait for the synchronous loads of the step that just ran. Launches nothing more: the
        model has read the blocks.
        """
        deadline = time.monotonic() + SYNCHRONOUS_SECONDS
        while self._synchronous:
            # The load stays in the list until its verdict is noted: if this raises in `store`,
            # `invalid` tries again.
            loading = self._synchronous[0]
            loading.hold()
            while not loading.advance():
                if time.monotonic() > deadline:
                    loading.abandon()
                    break
                loading.wait(IDLE_SECONDS)
            self._note(loading)
            if loading.invalid:
                self._synchronous_failed(loading.spec)
            del self._synchronous[0]

    def finished(self, idle: bool) -> set[str]:
        """Requests whose asynchronous load is over, successful or not. Advances the others.

        idle: the step runs no model, so it waits up to `IDLE_SECONDS` for a load to end.
        """
        done = self._advance() | self._give_up()
        began = time.monotonic()
        while idle and self._asynchronous and not done:
            first = self._asynchronous[0]
            if time.monotonic() > began + IDLE_SECONDS:
                break
            first.wait(IDLE_SECONDS)
            done = self._advance()
        return done

    def unfilled(self) -> set[int]:
        """Blocks that a load should have filled by now and has not, vLLM's numbers."""
        return self._invalid.union(*(spec.wanted for spec in self._lost))

    def invalid(self) -> set[int]:
        """Blocks that loads did not fill, since the last call, vLLM's numbers; none where failures
        are told by request.

        Waits for the synchronous loads.
        """
        self.settle()
        found, self._invalid = self._invalid, set()
        return found if not self._several else set()

    def failed(self) -> set[str]:
        """Requests whose asynchronous load failed since the last call; none where failures are told
        by block.
        """
        failed, self._failed = self._failed, set()
        return failed

    # ---- the end

    def stop(self, deadline: float) -> None:
        """vLLM takes the KV cache's memory away: cancel the asynchronous loads, and abandon those
        that still run at `deadline`.
        """
        for loading in self._asynchronous:
            loading.cancel()
        for loading in self._asynchronous:
            while not loading.advance() and time.monotonic() < deadline:
                loading.wait(IDLE_SECONDS)
            loading.abandon()
            # vLLM still waits for its end, and its bytes are gone in any case.
            self._lost.append(loading.spec)
        self._asynchronous.clear()

    def close(self, deadline: float) -> None:
        """Cancel the asynchronous loads, and let copies under way end until `deadline`
        (time.monotonic).
        """
        for loading in self._asynchronous:
            loading.cancel()
        while self._asynchronous and time.monotonic() < deadline:
            self._advance(closing=True)
            for loading in self._asynchronous[:1]:
                loading.wait(IDLE_SECONDS)

    # ---- inside

    def _advance(self, closing: bool = False) -> set[str]:
        over = set()
        for loading in list(self._asynchronous):
            if loading.advance():
                self._asynchronous.remove(loading)
                try:
                    self._note(loading)
                    if loading.spec.promote and not loading.cause and not closing:
                        self._stores.promote(loading, loading.spec, self._invalid)
                    over.add(loading.spec.request_id)
                except Exception:  # vLLM waits for the end of this one too
                    log.exception("vcache: a load's end could not be noted, so it counts as failed")
                    self._lost.append(loading.spec)
        return over

    def _give_up(self) -> set[str]:
        """Report the loads that never began as failed. The requests of those that are
        asynchronous.
        """
        lost, self._lost = self._lost, []
        for spec in lost:
            self._report.failed.add(spec.request_id)
            self._invalid |= set(spec.wanted)
            self._note_failed(spec)
            self._say(spec, None)
            if spec.synchronous:
                self._report.read.add(spec.number)
                self._synchronous_failed(spec)
        return {spec.request_id for spec in lost if not spec.synchronous}

    def _note_failed(self, spec: LoadSpec) -> None:
        if self._several and not spec.synchronous:
            self._failed.add(spec.request_id)

    def _synchronous_failed(self, spec: LoadSpec) -> None:
        if not self._model.recomputes:
            self.unsafe = f"a load of request {spec.request_id} failed that its step had counted on"

    def _note(self, loading: Loading) -> None:
        """Report a load that is over, and count it."""
        invalid, name = loading.invalid, loading.spec.request_id
        if loading.spec.synchronous:
            self._report.read.add(loading.spec.number)
        if invalid:
            self._report.failed.add(name)
            self._invalid |= set(invalid)
            self._note_failed(loading.spec)
        self._say(loading.spec, loading)
        with suppress(Exception):  # a number too few
            if loading.stats.tokens.total() or not loading.cause:
                self._meter.loaded(loading.stats)
            if loading.cause and loading.cause != transfer.CANCELLED:
                tokens = len(invalid) * self._model.block_size
                log.warning(
                    "%d tokens of request %s are computed, not loaded: %s",
                    tokens,
                    name,
                    loading.failure,
                )
                self._meter.count("failures", 1, loading.failure)
                self._meter.count("recomputed_tokens", tokens)

    def _say(self, spec: LoadSpec, loading: Loading | None) -> None:
        """Add the load's span to the report. loading: None if it never began."""
        name, number, now = spec.request_id, self._report.number, time.time_ns()
        if loading is None:
            self._report.spans.append(LoadSpan(name, number, now, now, {}, 0.0, 0.0, "never began"))
            return
        stats = loading.stats
        nbytes = {tier: tokens * stats.token_bytes for tier, tokens in stats.tokens.items()}
        times = stats.metadata_seconds, stats.data_seconds
        self._report.spans.append(
            LoadSpan(name, number, loading.began, now, nbytes, *times, loading.failure)
        )
