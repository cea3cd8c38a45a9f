"""What this instance shares in place, as its scheduler knows it: the generations of its blocks, and which chunks lie in them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, MAX_PUBLISHED, InstanceId
from vcache_backend.resident.generations import Generations

from .metadata import PublicationSpec
from .resident_pool import ResidentPool

if TYPE_CHECKING:
    from .lookups import Tracked

log = logging.getLogger("vllm.vcache")


def begin(kv_cache_config: Any, each: int) -> tuple[Publications | None, str | None]:
    """The publications of a new instance, or why there can be none. each: vLLM's blocks of a chunk."""
    try:
        return Publications(kv_cache_config.num_blocks, each), None
    except VCacheError as error:
        return None, str(error)


class Publications:
    """In the scheduler's thread. instance: this start of this engine, among all that there ever were. each: vLLM's blocks of a chunk.

    sequence: of the next publication; one of before a reset has a lower one.
    """

    def __init__(self, blocks: int, each: int) -> None:
        """blocks: of vLLM's pool. SegmentError if there is no memory for the table."""
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.generations = Generations(self.instance, blocks)
        self.retract: Callable[[int], None] = lambda sequence: None
        """Told after a reset: publications of a lower sequence are void."""
        self._resets = 0
        self._published: npt.NDArray[np.uint64] = np.zeros(blocks, dtype=np.uint64)
        """The generation in which each block was published; 0: never."""
        self._pool: ResidentPool | None = None

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. What it hands out before is not known to be anybody's."""
        return self._pool is not None

    def watch(self, pool: Any) -> None:
        """pool: vLLM's `BlockPool`. ValueError if it has other blocks than were told."""
        if pool.num_gpu_blocks != self.blocks:
            raise ValueError(f"vLLM's pool has {pool.num_gpu_blocks} blocks, its KV cache {self.blocks}")
        self._pool = ResidentPool(pool, self.generations, self._reset)

    def reset(self) -> None:
        """Nothing that was computed, or is being computed, is what was asked for any more."""
        self.generations.change_all()
        self._reset()

    def loads(self, tracked: Tracked) -> None:
        """Blocks of the request are to be filled from elsewhere, with what counts now."""
        tracked.resets = self._resets

    def capture(self, tracked: Tracked, blocks: Sequence[int], anew: bool) -> None:
        """The request has got these blocks, or hit them, since the last step. anew: they are all that it has."""
        before, tracked.resets = tracked.resets, None
        numbers = np.fromiter(blocks, dtype=np.intp, count=len(blocks))
        # They may be filled with what no longer counts; nothing is published behind those.
        void = before is not None and before != self._resets
        piece = numbers, np.zeros(len(numbers), dtype=np.uint64) if void else self.generations.counters[numbers]
        if anew:
            tracked.captured = [piece]
        else:
            tracked.captured.append(piece)

    def complete(self, tracked: Tracked, ready: int, loads: bool) -> list[PublicationSpec]:
        """Publish the request's leading `ready` chunks once the step is over, which has all of their tokens computed; but none that was
        published already, and none behind a block that has got another owner or another meaning since the request got it.

        loads: the step loads, too.
        """
        if self._pool is None or self._pool.broken:
            return []
        if len(tracked.captured) > 1:
            numbers, generations = zip(*tracked.captured, strict=True)
            tracked.captured = [(np.concatenate(numbers), np.concatenate(generations))]
        end = ready * self.each
        blocks, captured = (of_all[:end] for of_all in tracked.captured[0])
        lost = self.generations.counters[blocks] != captured
        right = int(lost.argmax()) // self.each if lost.any() else ready
        fresh = (self._published[blocks] != captured).reshape(-1, self.each).any(axis=1)
        chosen = np.flatnonzero(fresh[:right])
        self._published[blocks[: right * self.each]] = captured[: right * self.each]
        before = blocks.tolist() if loads else []
        return [
            self._spec(tracked, chosen[at : at + MAX_PUBLISHED], blocks, captured, before)
            for at in range(0, len(chosen), MAX_PUBLISHED)
        ]

    def forget(self, tracked: Tracked) -> None:
        """Nobody knows what was published of the request: publish it again when it is computed."""
        for blocks, _ in tracked.captured:
            self._published[blocks] = 0

    def close(self) -> None:
        """Idempotent."""
        self.generations.close()

    # ---- inside

    def _spec(
        self, tracked: Tracked, chunks: npt.NDArray[np.intp], blocks: Any, captured: Any, before: list[int]
    ) -> PublicationSpec:
        self.sequence += 1
        return PublicationSpec(
            request_id=tracked.request.request_id,
            keys=[tracked.keys[chunk] for chunk in chunks.tolist()],
            blocks=blocks.reshape(-1, self.each)[chunks].astype("<u4").tobytes(),
            generations=captured.reshape(-1, self.each)[chunks].astype("<u8").tobytes(),
            sequence=self.sequence - 1,
            before=before,
        )

    def _reset(self) -> None:
        self._resets += 1
        self.retract(self.sequence)
