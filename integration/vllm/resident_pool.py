"""vLLM's block pool, watched: a block's generation changes before anybody may write it again, or its bytes mean something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.generations import Generations

log = logging.getLogger("vllm.vcache")
_NUMBER = attrgetter("block_id")


class ResidentPool:
    """In the scheduler's thread. vLLM's own results and exceptions come through unchanged; if what is done here fails, the whole table
    is given up first, so that nobody reads a block whose next owner was not counted.

    broken: whether that has happened.
    """

    def __init__(self, pool: Any, generations: Generations, on_reset: Callable[[], None]) -> None:
        """pool: vLLM's `BlockPool`, before it has handed out a block. on_reset: called when the prefix cache is to be reset, whatever vLLM
        then decides."""
        self.broken = False
        self._step = 1
        self._taken: npt.NDArray[np.int64] = np.zeros(generations.blocks, dtype=np.int64)
        """The step for which each block was handed out last."""
        # Also the null block's, whose bytes are of no request: none is anybody's until it is handed out and written.
        generations.void_all()
        self._generations, self._on_reset = generations, on_reset
        self._get, self._evict, self._reset = pool.get_new_blocks, pool.evict_blocks, pool.reset_prefix_cache
        pool.get_new_blocks, pool.evict_blocks = self._get_new_blocks, self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache

    def taken(self, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of these were handed out for the step that is being planned."""
        taken: npt.NDArray[np.bool_] = self._taken[blocks] == self._step
        return taken

    def planned(self) -> None:
        """What is handed out from now on is for the next step."""
        self._step += 1

    def _get_new_blocks(self, num_blocks: int) -> Any:
        """What writes them is launched after this has returned."""
        blocks = self._get(num_blocks)
        self._surely(lambda: self._take(np.fromiter(map(_NUMBER, blocks), dtype=np.intp, count=len(blocks))))
        return blocks

    def _take(self, blocks: npt.NDArray[np.intp]) -> None:
        self._generations.void(blocks)
        self._taken[blocks] = self._step

    def _evict_blocks(self, block_ids: Any) -> Any:
        """After a load that failed vLLM computes into the same blocks, without allocating them anew: these stay void."""
        self._surely(lambda: self._generations.void(list(block_ids)))
        return self._evict(block_ids)

    def _reset_prefix_cache(self) -> Any:
        """The bytes stay and mean something else, also where vLLM then says that it cannot reset now: its caller changes the weights."""
        self._surely(self._generations.void_all)
        self._surely(self._on_reset)
        return self._reset()

    def _surely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # nothing of ours raises into vLLM
            self._generations.give_up()
            self.broken = True
            log.exception("vcache: blocks could not be counted; nothing of this instance is read by others any more")
