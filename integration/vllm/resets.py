"""What makes KV wrong that was right: resets by vLLM and by other instances, another version of the
weights, and failed loads of another connector."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from itertools import count

from .instance import InstanceContext
from .lookups import Lookups
from .metadata import StepMetadata, WorkerReport
from .model import versions
from .promises import PromiseSender
from .requests import Beginning, Tracked
from .stores import StorePlanner
from .waits import Waits

log = logging.getLogger("vllm.vcache")


class Resets:
    """Runs in the scheduler's thread.

    A step's echo is a number that all workers report once the step's model run is over and all
    stores of earlier steps have begun."""

    def __init__(
        self,
        context: InstanceContext,
        requests: Mapping[str, Tracked],
        lookups: Lookups,
        waits: Waits,
        promises: PromiseSender,
        planner: StorePlanner,
    ) -> None:
        """requests: the living ones, by id."""
        self._context, self._requests, self._lookups = context, requests, lookups
        self._waits, self._promises, self._planner = waits, promises, planner
        self._echoes = count(1)
        self.clearing = False
        """The server has yet to hear of a reset, and look-ups must wait."""
        self._just_reset = False
        """A reset was made, and no request has begun since."""
        self._foreign = 0
        """The echo of the last step in which another connector loaded."""
        self._survivors = False
        """Requests have gone on over the last reset. Another connector may load what they
        computed."""

    # ---- resets

    def reset(self) -> bool:
        """Reset the namespace: remove all chunks, including those still being stored. For vLLM's
        `reset_cache`. False if the server did not answer.

        Before the first step the namespace is unknown. Then the reset happens before the first
        look-up, and the answer is True: vLLM, paused for new weights, would end on a False.

        With versions, the instance leaves its version, whose chunks stay for other instances."""
        # vLLM resets other connectors, too, but nobody resets them beside another instance's reset.
        self._survivors = False
        if self._context.versions:
            log.info("vcache: nothing is shared until the version of the weights is named")
            self.change_version(versions.unknown())
            return True
        self.change_version(b"")
        self._just_reset = True
        self.forget_answers()
        self._void()
        # What running steps publish and store is of the old epoch, and the server refuses it.
        self.clearing = not self._context.clear()
        if not self.clearing:
            # Nothing was planned meanwhile, so all is done.
            self._context.news.learn()
        return not (self.clearing and self._context.introduced)

    def on_reset_elsewhere(self) -> None:
        """Another instance has reset the namespace, or a server has lost its resets: find and store
        nothing of before."""
        self.forget_answers()
        self._void()

    def leave_version(self) -> None:
        """Share nothing more, since the weights change: without versions until the next reset,
        unless a reset has just come, as with a pause."""
        if self._context.versions or not self._just_reset:
            if not self._context.version:
                log.warning("vcache: vLLM's weights change: nothing is shared until the next reset")
            self.change_version(versions.unknown())

    def change_version(self, version: bytes) -> None:
        """Read and store chunks of this version from the next step on. See docs/adr/0024."""
        context = self._context
        if version == context.version:
            return
        # If a call below raises, the next steps store under keys that nobody finds.
        context.version = versions.unknown()
        # First for all requests: nothing may be stored under a key of other weights.
        for tracked in self._requests.values():
            self._lookups.rename(tracked)
        for tracked in self._requests.values():
            self._promises.withdraw(tracked)
            # The awaited chunks have other keys now.
            self._waits.over(tracked, "withdrawn")
        if context.announcer is not None:
            context.announcer = context.announcer.renewed()
        self._void()
        context.version = version

    def forget_answers(self) -> None:
        """Forget what was found before a reset, by this instance or another one."""
        for tracked in self._requests.values():
            self._lookups.forget(tracked)

    # ---- steps

    def on_step(self, beginning: Collection[Beginning], meta: StepMetadata) -> None:
        """Note a planned step. beginning: the requests that begin or resume in it.

        Another connector loads in the step (under MultiConnector) if a request begins with more
        tokens than vLLM's cache and vcache supply. If this load fails, vLLM computes tokens again.
        So requests that begin now, perhaps with blocks of that load, store nothing before the step
        is over."""
        self._just_reset &= meta.idle and not meta.loads
        self._clear()
        if not beginning:
            return
        foreign = any(one.whole > one.tracked.supplied for one in beginning)
        if foreign:
            self._foreign = next(self._echoes)
            meta.echoes.add(self._foreign)
        for one in beginning:
            one.tracked.store.trusted_after = self._foreign
            if foreign and self._survivors:
                self._keep_out(one.tracked)

    def note(self, report: WorkerReport, invalid: AbstractSet[int]) -> None:
        """Act on the workers' report about a step. invalid: the blocks that no load has filled."""
        if invalid and self._foreign > self._planner.trusted:
            loads = [tracked.load for tracked in self._requests.values() if tracked.load]
            if not invalid <= {block for load in loads for block in load.blocks}:
                # vLLM computes the blocks of running requests again, but not all that requests have
                # computed behind them since.
                self._distrust()
        self._planner.trusted = max(self._planner.trusted, *report.echoes, 0)
        self._clear()

    # ---- inside

    def _clear(self) -> None:
        """Make a reset of which the server has yet to hear."""
        if self.clearing:
            self.clearing = not self._context.clear()

    def _void(self) -> None:
        """Store nothing that builds on vLLM's present KV."""
        if self._context.publications is not None:
            # Blocks are void until they are filled anew.
            self._context.publications.pool.void_all()
        else:
            self._distrust()

    def _distrust(self) -> None:
        """Store nothing more of the requests that have blocks now. No other request finds their
        blocks, or earlier ones, in vLLM's cache."""
        blocks = self._context.blocks
        held = blocks.held if blocks is not None else set[int]()
        for tracked in self._requests.values():
            # A request has blocks before its first step, too, if its load is over, or if vLLM has
            # just found blocks for it.
            found = tracked.local or tracked.request.num_computed_tokens
            has = tracked.store.block_tables or tracked.load or found
            if held and has:
                self._keep_out(tracked)
            else:
                self._planner.mark_stored(tracked, 0)
        self._survivors |= bool(held)
        if blocks is not None and held:
            blocks.evict(held)

    def _keep_out(self, tracked: Tracked) -> None:
        """Store nothing more of the request, and let no other request find its blocks."""
        self._planner.stop(tracked)
        if (blocks := self._context.blocks) is not None:
            blocks.kept_out.add(tracked.request.request_id)
            blocks.evict_hashed(tracked.request.block_hashes, len(self._context.groups.sizes))
