"""What this instance shares in place, as its scheduler knows it: the generations of its blocks, and which chunks lie in them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, MAX_PUBLISHED, Heard, InstanceId
from vcache_backend.resident import pins
from vcache_backend.resident.generations import Generations, GenerationView

from .duplicates import Duplicates
from .hints import Hints
from .metadata import PublicationSpec
from .resident_pool import ResidentPool

if TYPE_CHECKING:
    from .lookups import Tracked

log = logging.getLogger("vllm.vcache")
NEVER = 1 << 62
"""Blocks that no request has."""


def begin(kv_cache_config: Any, each: int) -> tuple[Publications | None, str | None]:
    """The publications of a new instance, or why there can be none. each: vLLM's blocks of a chunk."""
    try:
        return Publications(kv_cache_config.num_blocks, each), None
    except VCacheError as error:
        return None, str(error)


class Publications:
    """In the scheduler's thread. instance: this start of this engine, among all that there ever were. each: vLLM's blocks of a chunk.

    sequence: of the next publication; one of before a reset has a lower one. epoch: the one in which everything was computed that is
    published; `heard`: the one that it is now. hints: what others have read, once vLLM has shown its pool.
    """

    def __init__(self, blocks: int, each: int) -> None:
        """blocks: of vLLM's pool. SegmentError if there is no memory for the table."""
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.epoch = self.heard = 0
        self.generations = Generations(self.instance, blocks)
        self.pins = pins.Pins(self.generations) if pins.possible() else None
        """What readers ask this instance not to hand out."""
        self.retract: Callable[[int], None] = lambda sequence: None
        """Told after a reset: publications of a lower sequence are void."""
        self._published: npt.NDArray[np.uint64] = np.zeros(blocks, dtype=np.uint64)
        """The generation in which each block was published; 0: never."""
        self._pool: ResidentPool | None = None
        self.hints: Hints | None = None
        self.duplicates: Duplicates | None = None
        """What others have as well, once vLLM has shown its pool."""
        self.view: Callable[[bytes], GenerationView | None] = lambda instance: None
        """Another instance's generations, once there is a server to ask."""

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. What it hands out before is not known to be anybody's."""
        return self._pool is not None

    def watch(self, pool: Any) -> None:
        """pool: vLLM's `BlockPool`. ValueError if it has other blocks than were told."""
        if pool.num_gpu_blocks != self.blocks:
            raise ValueError(f"vLLM's pool has {pool.num_gpu_blocks} blocks, its KV cache {self.blocks}")
        self.duplicates = Duplicates(pool, self.generations, self.each, lambda instance: self.view(instance))
        self._pool = ResidentPool(pool, self.generations, self._reset, self.pins, self.duplicates.give_way)
        self.hints = Hints(pool, self.generations, self.each)

    def reset(self) -> None:
        """Nothing that was computed, or is being computed, is what was asked for any more."""
        self._void_all()
        self._reset()

    def hear(self, heard: Heard) -> None:
        """What the server says, for `learn`. Any thread."""
        self.heard = heard.epoch
        if self.hints is not None:
            self.hints.hear(heard)

    def learn(self) -> bool:
        """Take note of what was heard; True if the namespace was reset. What this instance computed before is not to be found by others,
        however long vLLM's own cache, which nobody has reset, goes on with it."""
        if self.hints is not None:
            self.hints.apply()
        heard = self.heard
        if heard == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def capture(self, tracked: Tracked, blocks: Sequence[int], anew: bool) -> None:
        """The request has got these blocks, or hit them, since the last step. anew: they are all that it has.

        Of a block that it got, the generation is the one that is to come, once it is filled. What it hit may have been handed out, and
        filled, in the same step: for a request that is planned before it.
        """
        if self._pool is None:
            return
        numbers = np.fromiter(blocks, dtype=np.intp, count=len(blocks))
        now = self.generations.counters[numbers]
        own = self._pool.taken(numbers) & (now & np.uint64(1) == 1)
        if anew:
            own |= _still(tracked, numbers, now)
            tracked.captured, tracked.filled, tracked.preempted = [], 0, tracked.request.num_preemptions
        tracked.captured.append((numbers, now + own))

    def fill(self, tracked: Tracked, blocks: int) -> None:
        """The step, which is planned, writes the last of the request's leading `blocks`: from then on these hold what they stand for.

        vLLM's cache knows them even if no step writes them, so what is not in a step's plan stays unreadable; and so does all that is
        computed behind such a block, or behind one of before a reset.
        """
        if self._pool is None:
            return
        start, tracked.filled = tracked.filled, blocks
        numbers, captured = _captured(tracked)
        first, numbers, captured = (numbers[0], captured[0]), numbers[start:blocks], captured[start:blocks]
        counters = self.generations.counters
        now, even = counters[numbers], captured & np.uint64(1) == 0
        mine = even & (now + np.uint64(1) == captured)
        if not (even & (mine | (now == captured))).all() or (start and counters[first[0]] != first[1]):
            tracked.filled = NEVER
        else:
            self.generations.filled(numbers[mine])

    def planned(self) -> None:
        """The step has all blocks that it gets."""
        if self._pool is not None and self.hints is not None:
            self._pool.planned()
            self.hints.planned()

    def complete(self, tracked: Tracked, ready: int, loads: bool) -> list[PublicationSpec]:
        """Publish the request's leading `ready` chunks once the step is over, which has all of their tokens computed; but none that was
        published already, and none behind a block that has got another owner or another meaning since the request got it.

        loads: the step loads, too.
        """
        if self._pool is None or self._pool.broken:
            return []
        end = ready * self.each
        blocks, captured = (of_all[:end] for of_all in _captured(tracked))
        lost = (self.generations.counters[blocks] != captured) | (captured & np.uint64(1) == 1)
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
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.close()
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
            epoch=self.epoch,
        )

    def _void_all(self) -> None:
        (self.generations if self._pool is None else self._pool).void_all()

    def _reset(self) -> None:
        self.retract(self.sequence)


def _captured(tracked: Tracked) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64]]:
    """The request's blocks, and the generations in which they are its own."""
    if len(tracked.captured) != 1:
        numbers, generations = zip(*tracked.captured, strict=True)
        tracked.captured = [(np.concatenate(numbers), np.concatenate(generations))]
    return tracked.captured[0]


def _still(tracked: Tracked, numbers: npt.NDArray[np.intp], now: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of these the request got before, and has not filled: a load has, or it goes on with more tokens. After a preemption it finds
    its own in vLLM's cache, as anybody does."""
    still = np.zeros(len(numbers), dtype=np.bool_)
    if tracked.captured and tracked.preempted == tracked.request.num_preemptions:
        before, captured = _captured(tracked)
        known = min(len(numbers), len(before))
        still[:known] = (numbers[:known] == before[:known]) & (now[:known] + np.uint64(1) == captured[:known])
    return still
