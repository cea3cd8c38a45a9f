"""Which loads are synchronous: part of the step that needs them, which waits for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vcache_backend.config import Config
from vcache_backend.metadata_server.messages import MAX_KEYS

from .introduction import Introduction
from .model_spec import ModelSpec
from .tracked import Tracked

MOST_SYNCHRONOUS = 65_536
"""Tokens that the synchronous loads of one step may bring: 8 GiB of an 8B model, 25 ms from another GPU, a tenth of `GRACE_SECONDS`."""
LATE = 2
"""Steps after which all workers have said that a load held, so that what was computed with it is stored: a request must last longer. In
disaggregated prefill it does not, and its tokens are waited for elsewhere."""


class SynchronousLoads:
    """In the scheduler's thread. What the step that is being planned, or the next one, may wait for."""

    def __init__(self, below: int, recomputes: bool, chunk_size: int, instance: Introduction) -> None:
        """below: see `most_tokens`. recomputes: vLLM can compute again a step whose load failed."""
        self._below, self._recomputes, self._size, self._instance = below, recomputes, chunk_size, instance
        self._scheduled: Mapping[str, int] = {}
        """Tokens by request, of the last step that was planned."""
        self._promised = self._leased_ahead = 0

    def fits(self, tracked: Tracked, tokens: int, living: Collection[str]) -> bool:
        """Whether the step that runs the request may wait for so many of its tokens. living: requests that have not ended.

        Others would wait too; and where the load must not fail any more, it has to be over soon: nothing may run before it.
        """
        if not self._below or tracked.params.announced or tracked.consumes:
            return False
        if self._instance.workers > 1 and tracked.request.max_tokens <= LATE:
            return False
        if self._instance.shared is None and tokens > MAX_KEYS // self._instance.ranks * self._size:
            # No lease is on so many chunks, and their hit would be shorter.
            return False
        if self._recomputes and tokens < self._below:
            return True
        if self._promised + tokens > MOST_SYNCHRONOUS:
            return False
        own = tracked.request.request_id
        return all(name == own or name not in living for name in self._scheduled)

    def leases_ahead(self, tracked: Tracked, tokens: int, living: Collection[str]) -> bool:
        """Whether a question about a request that has only arrived is to bring a lease, too. Chunks are kept from eviction by it."""
        if self._instance.shared is not None or self._leased_ahead + tokens > MOST_SYNCHRONOUS:
            return False
        leases = self.fits(tracked, tokens, living)
        self._leased_ahead += tokens if leases else 0
        return leases

    def promise(self, tokens: int) -> None:
        """The step waits for so many more."""
        self._promised += tokens

    def begin(self, scheduled: Mapping[str, int]) -> None:
        """A step with so many tokens of these requests is planned."""
        self._scheduled, self._promised, self._leased_ahead = scheduled, 0, 0


def most_tokens(vllm_config: Any, config: Config, model: ModelSpec, several: bool) -> int:
    """Of a load that a busy step may wait for, where vLLM can recompute it; 0: no load is synchronous. several: block tables."""
    sure = model.recomputes or not config.engine.checksum
    if config.connector.share == "in_place":
        # What lies in place is not checked by its checksum. Ranks with one model of experts, which alone know of each other, run their
        # steps together: one that waits would hold up all.
        sure = vllm_config.parallel_config.data_parallel_size == 1
    # A pipeline's later stages would begin their copies when the earlier ones have computed. What is stored late, windows have passed.
    together = model.pp_size == 1 and (model.tp_size == 1 or not several)
    return config.connector.sync_below_tokens if together and sure else 0
