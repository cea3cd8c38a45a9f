"""Watches vLLM's block pool, so that a block's generation changes before the block may be written
again or its bytes change meaning.
"""

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
"""How long a step waits if all free blocks are pinned."""
_SLICE_SECONDS = 0.0001
NUMBERS, GENERATIONS = "I", "Q"
"""Type codes of `array` for blocks' numbers and for generations. Slicing an array copies bytes;
slicing a list touches every number.
"""


class ResidentPool:
    """Replaces methods of vLLM's `BlockPool` to count generations. In the scheduler's thread.

    vLLM's own results and exceptions come through unchanged. If our part fails, the whole table is
    given up first, so that nobody reads a block whose next owner was not counted. broken: whether
    that has happened. resets: how often all blocks were voided. evicted: how often vLLM has evicted
    blocks. kept: how many pinned blocks were spared when they came up. forced: how many pinned
    blocks were handed out all the same."""

    def __init__(
        self,
        pool: Any,
        generations: Generations,
        on_reset: Callable[[], None],
        pins: Pins | None = None,
        give_way: Callable[[int], None] = lambda count: None,
    ) -> None:
        """pool: vLLM's `BlockPool`, before it has handed out a block. on_reset: called when the
        prefix cache is to be reset, even if vLLM then declines. pins: those on the same blocks;
        None: honour none. give_way: called before so many blocks are handed out, to put others
        first; must not raise."""
        self._give_way = give_way
        self.broken, self.resets, self.evicted, self.kept, self.forced, self._pins = (
            False,
            0,
            0,
            0,
            0,
            pins,
        )
        # All of them, the null block included: none holds a request's bytes until it is handed out
        # and written.
        generations.void_all()
        self._generations, self._on_reset = generations, on_reset
        self._queue: Any = pool.free_block_queue if pins is not None else None
        self._get, self._evict, self._reset = (
            pool.get_new_blocks,
            pool.evict_blocks,
            pool.reset_prefix_cache,
        )
        pool.get_new_blocks, pool.evict_blocks = self._get_new_blocks, self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache
        if pins is not None:
            self._free, pool.free_blocks = pool.free_blocks, self._free_blocks
            generations.show_free(pool.free_block_queue.num_free_blocks)

    def planned(self) -> None:
        """The step has got all its blocks: show others how many are free."""
        if self._pins is not None:
            self._generations.show_free(self._queue.num_free_blocks)

    def void_all(self) -> None:
        """Void all generations: the bytes stay, but mean something else. Waits until no reader's
        step counts on a pin any more.
        """
        self.resets += 1
        with self._pins.none() if self._pins is not None else nullcontext():
            self._generations.void_all()

    def _get_new_blocks(self, num_blocks: int) -> Any:
        """Count the blocks' new generation before vLLM can launch anything that writes them."""
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
        # A step that only decodes takes one block at a time.
        self._generations.void(blocks[0].block_id if len(blocks) == 1 else _numbers(blocks))
        if self._pins is not None:
            self._generations.show_free(self._queue.num_free_blocks)

    def _make_way(self, count: int) -> None:
        """See to it that none of the next `count` blocks is pinned, or gets pinned before `resume`.
        If vLLM has fewer, nothing changes.
        """
        assert self._pins is not None
        if not self._pins.halt():
            return
        blocks = self._first(count)
        if len(blocks) == count:
            self._around(blocks)

    def _around(self, blocks: list[Any]) -> None:
        """Move the pinned ones of these blocks, the first in vLLM's free queue, to its end, as if
        they had just been used.

        If too few blocks are unpinned, it waits up to `WAIT_SECONDS`, and then lets pinned ones be
        handed out."""
        assert self._pins is not None
        count, queue, moved, until = (
            len(blocks),
            self._queue,
            set[int](),
            time.monotonic() + WAIT_SECONDS,
        )
        while (pinned := self._pins.on(numbers := _numbers(blocks))) is not None and pinned[
            :count
        ].any():
            if not moved.isdisjoint(numbers[:count][pinned[:count]].tolist()):
                if time.monotonic() > until:
                    self.forced += (forced := int(pinned[:count].sum()))
                    self._pins.rest()
                    log.warning(
                        "vcache: vLLM uses %d blocks again while other instances read them: no others are free",
                        forced,
                    )
                    break
                time.sleep(_SLICE_SECONDS)
            moved.update(numbers[pinned].tolist())
            self.kept += int(pinned.sum())
            for at in np.flatnonzero(pinned).tolist():
                queue.remove(blocks[at])
                queue.append(blocks[at])
            # Pinned blocks come in long runs: looking at them one by one took 66 ms.
            blocks = self._first(2 * len(blocks))

    def _first(self, count: int) -> list[Any]:
        """The next `count` blocks that vLLM will hand out; fewer if it has fewer."""
        blocks, block = [], self._queue.fake_free_list_head
        for _ in range(min(count, self._queue.num_free_blocks)):
            block = block.next_free_block
            blocks.append(block)
        return blocks

    def _evict_blocks(self, block_ids: Any) -> Any:
        """Void blocks that vLLM evicts. After a failed load it recomputes into the same blocks
        without allocating them anew.

        Pins need no check: blocks of a failed load were never published.
        """
        self.evicted += 1
        self._surely(lambda: self._generations.void(list(block_ids)))
        return self._evict(block_ids)

    def _free_blocks(self, *arguments: Any, **more: Any) -> Any:
        freed = self._free(*arguments, **more)
        self._surely(lambda: self._generations.show_free(self._queue.num_free_blocks))
        return freed

    def _reset_prefix_cache(self) -> Any:
        """Void all blocks even if vLLM answers that it cannot reset now: its caller changes the
        weights all the same.
        """
        self._surely(self.void_all)
        self._surely(self._on_reset)
        return self._reset()

    def _surely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # nothing of ours raises into vLLM
            self._generations.give_up()
            self.broken = True
            log.exception(
                "vcache: the generations of blocks could not be counted, so others read nothing of this instance any more"
            )


def _numbers(blocks: list[Any]) -> npt.NDArray[np.uint32]:
    # Twice as fast as numpy's conversion of a list.
    return np.frombuffer(array(NUMBERS, [block.block_id for block in blocks]), dtype=np.uint32)
