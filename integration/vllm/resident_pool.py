"""Watches vLLM's block pool, so that a block's generation changes before the block may be written
again or its bytes change meaning.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.generations import Generations

log = logging.getLogger("vllm.vcache")
NUMBERS, GENERATIONS = "I", "Q"
"""Type codes of `array` for blocks' numbers and for generations. Slicing an array copies bytes;
slicing a list touches every number.
"""


class ResidentPool:
    """Replaces methods of vLLM's `BlockPool` to count generations. In the scheduler's thread.

    vLLM's own results and exceptions come through unchanged. If our part fails, the whole table is
    given up first, so that nobody reads a block whose next owner was not counted. broken: whether
    that has happened. resets: how often all blocks were voided. evicted: how often vLLM has evicted
    blocks."""

    def __init__(
        self,
        pool: Any,
        generations: Generations,
        on_reset: Callable[[], None],
        give_way: Callable[[int], None] = lambda count: None,
    ) -> None:
        """pool: vLLM's `BlockPool`, before it has handed out a block. on_reset: called when the
        prefix cache is to be reset, even if vLLM then declines. give_way: called before so many blocks are handed out, to put others
        first; must not raise."""
        self._give_way = give_way
        self.broken, self.resets, self.evicted = False, 0, 0
        # All of them, the null block included: none holds a request's bytes until it is handed out
        # and written.
        generations.void_all()
        self._generations, self._on_reset = generations, on_reset
        self._get, self._evict, self._reset = (
            pool.get_new_blocks,
            pool.evict_blocks,
            pool.reset_prefix_cache,
        )
        pool.get_new_blocks, pool.evict_blocks = self._get_new_blocks, self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache

    def void_all(self) -> None:
        """Void all generations: the bytes stay, but mean something else."""
        self.resets += 1
        self._generations.void_all()

    def _get_new_blocks(self, num_blocks: int) -> Any:
        """Count the blocks' new generation before vLLM can launch anything that writes them."""
        self._give_way(num_blocks)
        blocks = self._get(num_blocks)
        self._surely(lambda: self._take(blocks))
        return blocks

    def _take(self, blocks: list[Any]) -> None:
        # A step that only decodes takes one block at a time.
        self._generations.void(blocks[0].block_id if len(blocks) == 1 else _numbers(blocks))

    def _evict_blocks(self, block_ids: Any) -> Any:
        """Void blocks that vLLM evicts. After a failed load it recomputes into the same blocks
        without allocating them anew.
        """
        self.evicted += 1
        self._surely(lambda: self._generations.void(list(block_ids)))
        return self._evict(block_ids)

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
