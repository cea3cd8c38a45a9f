"""Decides which loads are synchronous: part of the step that needs them, which waits for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vcache_backend.config import Config
from vcache_backend.metadata_server.messages import MAX_KEYS

from .introduction import Introduction
from .model_spec import ModelSpec
from .tracked import Tracked

MOST_SYNCHRONOUS = 65_536
"""Tokens that the synchronous loads of one step may bring, besides small ones that vLLM can
recompute: 8 GiB of an 8B model, 25 ms from another GPU, a tenth of `GRACE_SECONDS`."""
LATE = 2
"""Steps until all workers have confirmed a load, so that what was computed with it can be stored. A
request that answers with no more tokens than this would end unstored: in disaggregated prefill,
another instance waits for its chunks."""


class SynchronousLoads:
    """Which loads the step being planned, or the next one, may wait for. In the scheduler's
    thread.
    """

    def __init__(
        self, below: int, recomputes: bool, chunk_size: int, instance: Introduction
    ) -> None:
        """below: see `most_tokens`. recomputes: vLLM can recompute a step whose load failed."""
        self._below, self._recomputes, self._size, self._instance = (
            below,
            recomputes,
            chunk_size,
            instance,
        )
        self._scheduled: Mapping[str, int] = {}
        """By request: its tokens in the last step that was planned."""
        self._promised = self._leased_ahead = 0

    def fits(self, tracked: Tracked, tokens: int, living: Collection[str]) -> bool:
        """Whether the step that runs the request may wait for a load of so many tokens. living:
        requests that have not ended.

        The step's other requests wait too. A large load, or one that vLLM cannot recompute, must
        moreover be over within the lease's grace: then no other request may be running."""
        if not self._below or tracked.params.announced:
            return False
        if self._instance.workers > 1 and tracked.request.max_tokens <= LATE:
            return False
        if self._instance.shared is None and tokens > MAX_KEYS // self._instance.ranks * self._size:
            # One lease covers no more chunks, so the hit would be cut short.
            return False
        if self._recomputes and tokens < self._below:
            return True
        if self._promised + tokens > MOST_SYNCHRONOUS:
            return False
        own = tracked.request.request_id
        return all(name == own or name not in living for name in self._scheduled)

    def leases_ahead(self, tracked: Tracked, tokens: int, living: Collection[str]) -> bool:
        """Whether the question that is sent when a request arrives should take a lease, too, which
        keeps chunks from eviction.
        """
        if self._instance.shared is not None or self._leased_ahead + tokens > MOST_SYNCHRONOUS:
            return False
        leases = self.fits(tracked, tokens, living)
        self._leased_ahead += tokens if leases else 0
        return leases

    def promise(self, tokens: int) -> None:
        """The step being planned waits for so many more tokens."""
        self._promised += tokens

    def begin(self, scheduled: Mapping[str, int]) -> None:
        """A step is planned with so many tokens of each of these requests."""
        self._scheduled, self._promised, self._leased_ahead = scheduled, 0, 0


def most_tokens(vllm_config: Any, config: Config, model: ModelSpec, several: bool) -> int:
    """The most tokens of a load that a busy step may wait for, if vLLM can recompute it; 0: no load
    is synchronous.

    several: there are several block tables.
    """
    # In place, data parallel ranks that know of each other (experts) run their steps together: one
    # that waits would hold up all.
    alone = vllm_config.parallel_config.data_parallel_size == 1
    sure = config.connector.share != "in_place" or alone
    # A pipeline's later stages would begin their copies only after the earlier ones have computed.
    # And with several workers, stores wait for confirmation (`Unconfirmed`); windows would have
    # passed the blocks by then.
    together = model.pp_size == 1 and (model.tp_size == 1 or not several)
    return config.connector.sync_below_tokens if together and sure else 0
