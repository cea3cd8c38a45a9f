"""vLLM's block pool, watched: a block's generation changes before anybody may write it again, or its bytes mean something else."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.generations import Generations
from vcache_backend.resident.pins import Pins

log = logging.getLogger("vllm.vcache")
WAIT_SECONDS = 0.001
"""How long a step waits for blocks that all are pinned."""
_SLICE_SECONDS = 0.0001
NUMBERS, GENERATIONS = "I", "Q"
"""Types of arrays: of blocks' numbers, and of their generations. A slice of one is a copy of bytes; one of a list touches every number."""


class ResidentPool:
    """In the scheduler's thread. vLLM's own results and exceptions come through unchanged; if what is done here fails, the whole table
    is given up first, so that nobody reads a block whose next owner was not counted.

    broken: whether that has happened. resets, evicted: how often all blocks were made void, and how
    often vLLM has evicted some. kept, forced: how many blocks were pinned when it was
    their turn, and how many of those were handed out all the same.
    """

    def __init__(
        self,
        pool: Any,
        generations: Generations,
        on_reset: Callable[[], None],
        pins: Pins | None = None,
        give_way: Callable[[int], None] = lambda count: None,
    ) -> None:
        """pool: vLLM's `BlockPool`, before it has handed out a block. on_reset: called when the prefix cache is to be reset, whatever vLLM
        then decides. pins: of the same blocks; none is honoured otherwise. give_way: called before that many blocks are handed out, to
        put others first; must not raise."""
        self._give_way = give_way
        self.broken, self.resets, self.evicted, self.kept, self.forced, self._pins = False, 0, 0, 0, 0, pins
        # Also the null block's, whose bytes are of no request: none is anybody's until it is handed out and written.
        generations.void_all()
        self._generations, self._on_reset = generations, on_reset
        self._queue: Any = pool.free_block_queue if pins is not None else None
        self._get, self._evict, self._reset = pool.get_new_blocks, pool.evict_blocks, pool.reset_prefix_cache
        pool.get_new_blocks, pool.evict_blocks = self._get_new_blocks, self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache
        if pins is not None:
            self._free, pool.free_blocks = pool.free_blocks, self._free_blocks
            generations.show_free(pool.free_block_queue.num_free_blocks)

    def planned(self) -> None:
        """The step has all blocks that it gets."""
        if self._pins is not None:
            self._generations.show_free(self._queue.num_free_blocks)

    def void_all(self) -> None:
        """The bytes of all blocks stay and mean something else. No reader's step counts on them by then: what was read before is right."""
        self.resets += 1
        with self._pins.none() if self._pins is not None else nullcontext():
            self._generations.void_all()

    def _get_new_blocks(self, num_blocks: int) -> Any:
        """What writes them is launched after this has returned."""
        self._give_way(num_blocks)
        if self._pins is None:
            blocks = self._get(num_blocks)
            self._surely(lambda: self._take(blocks))
            return blocks
        self._surely(lambda: self._make_way(num_blocks))
        try:
            blocks = self._get(num_blocks)
            self._surely(lambda: self._take(blocks))
        finally:
            self._surely(self._pins.resume)
        return blocks

    def _take(self, blocks: list[Any]) -> None:
        # In a step that only decodes it is one.
        self._generations.void(blocks[0].block_id if len(blocks) == 1 else _numbers(blocks))
        if self._pins is not None:
            self._generations.show_free(self._queue.num_free_blocks)

    def _make_way(self, count: int) -> None:
        """Have none of the next `count` blocks pinned, nor get pinned before `resume`. If vLLM has not so many, nothing changes."""
        assert self._pins is not None
        if not self._pins.halt():
            return
        blocks = self._first(count)
        if len(blocks) == count:
            self._around(blocks)

    def _around(self, blocks: list[Any]) -> None:
        """Have these, vLLM's first, not pinned: those that are are its last then, as if they had just been used, with all that it knows of
        them. If there are too few others, they are handed out after `WAIT_SECONDS`."""
        assert self._pins is not None
        count, queue, moved, until = len(blocks), self._queue, set[int](), time.monotonic() + WAIT_SECONDS
        while (pinned := self._pins.on(numbers := _numbers(blocks))) is not None and pinned[:count].any():
            if not moved.isdisjoint(numbers[:count][pinned[:count]].tolist()):
                if time.monotonic() > until:
                    self.forced += (forced := int(pinned[:count].sum()))
                    self._pins.rest()
                    log.warning("vcache: %d blocks are handed out though others read them; there are no others", forced)
                    break
                time.sleep(_SLICE_SECONDS)
            moved.update(numbers[pinned].tolist())
            self.kept += int(pinned.sum())
            for at in np.flatnonzero(pinned).tolist():
                queue.remove(blocks[at])
                queue.append(blocks[at])
            # Where one is pinned many are: one by one they took 66 ms.
            blocks = self._first(2 * len(blocks))

    def _first(self, count: int) -> list[Any]:
        """The first blocks that vLLM hands out, as many as there are."""
        blocks, block = [], self._queue.fake_free_list_head
        for _ in range(min(count, self._queue.num_free_blocks)):
            block = block.next_free_block
            blocks.append(block)
        return blocks

    def _evict_blocks(self, block_ids: Any) -> Any:
        """After a load that failed vLLM computes into the same blocks, without allocating them anew: these stay void. No pin keeps them,
        and nobody has one on them: blocks of a load that failed were never published."""
        self.evicted += 1
        self._surely(lambda: self._generations.void(list(block_ids)))
        return self._evict(block_ids)

    def _free_blocks(self, *arguments: Any, **more: Any) -> Any:
        freed = self._free(*arguments, **more)
        self._surely(lambda: self._generations.show_free(self._queue.num_free_blocks))
        return freed

    def _reset_prefix_cache(self) -> Any:
        """Whatever vLLM decides, also where it says that it cannot reset now: its caller changes the weights."""
        self._surely(self.void_all)
        self._surely(self._on_reset)
        return self._reset()

    def _surely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # nothing of ours raises into vLLM
            self._generations.give_up()
            self.broken = True
            log.exception("vcache: blocks could not be counted; nothing of this instance is read by others any more")


def _numbers(blocks: list[Any]) -> npt.NDArray[np.uint32]:
    # In half of the time that numpy takes for each.
    return np.frombuffer(array(NUMBERS, [block.block_id for block in blocks]), dtype=np.uint32)
