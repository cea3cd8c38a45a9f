"""Keeps blocks that other instances read as if vLLM had used them: moves them to the end of its
free queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import numpy as np

from vcache_backend.metadata_server.messages import ChunkKey, Heard
from vcache_backend.resident.generations import Generations, UInt32s, UInt64s
from vcache_backend.transfer.outbox import Outbox

from .block_pool import KVBlocks
from .replicas import Run

log = logging.getLogger("vllm.vcache")

MOST_BLOCKS = 256
"""The most blocks moved in one step; this takes a quarter of a millisecond."""
MOST_WAITING = 16
"""The most heartbeats with hints that wait for the next step. Further hints are dropped, and their
chunks leave the cache earlier.
"""


def tell(outbox: Outbox | None, keys: list[ChunkKey], first: int, residents: Iterable[Run]) -> None:
    """Tell the owners of `residents`, in the background, that a load reads these chunks. residents:
    numbered from the request's chunk `first` on.

    A hint names the whole prefix, because a chunk is useless without the chunks before it."""
    ends = {run.instance: first + run.first + run.chunks for run in residents}
    if outbox is not None:
        for owner, end in ends.items():
            outbox.hint(owner, keys[:end])


class Hints:
    """Applies hints about this instance's own blocks. `hear` runs in any thread, the rest in the
    scheduler's.
    """

    def __init__(self, blocks: KVBlocks, generations: Generations, each: int) -> None:
        """each: blocks of a chunk."""
        self._blocks, self._generations, self._each = blocks, generations, each
        self.waiting: deque[tuple[UInt32s, UInt64s]] = deque()
        """The hints to be applied: blocks and their generations."""
        self._left = MOST_BLOCKS

    def hear(self, heard: Heard) -> None:
        """Queue chunks that others have read, for the next `apply`."""
        if not heard.blocks or len(self.waiting) >= MOST_WAITING:
            return
        blocks = np.frombuffer(heard.blocks, dtype="<u4").reshape(-1, self._each)
        generations = np.frombuffer(heard.generations, dtype="<u8").reshape(-1, self._each)
        # Move a chunk's last block first, so that a prefix leaves the cache from its end.
        self.waiting.append((blocks[:, ::-1].reshape(-1), generations[:, ::-1].reshape(-1)))

    def planned(self) -> None:
        """Allow the next step to move `MOST_BLOCKS` again."""
        self._left = MOST_BLOCKS

    def apply(self) -> None:
        """Move blocks of a waiting hint that are unused, and unchanged since others read them, to
        the end of vLLM's free queue. At most `MOST_BLOCKS` a step. Never raises.
        """
        if not self._left:
            return
        try:
            self._move(*self.waiting.popleft())
        except Exception:  # vLLM goes on with the present order
            self.waiting.clear()
            log.exception(
                "vcache: blocks that other instances have read are not kept longer than others"
            )

    def _move(self, blocks: UInt32s, generations: UInt64s) -> None:
        left = self._left
        if len(blocks) > left:
            self.waiting.appendleft((blocks[left:], generations[left:]))
        blocks, generations = blocks[:left], generations[:left]
        self._left -= len(blocks)
        same = self._generations.counters[blocks] == generations
        self._blocks.to_end(blocks[same].tolist())
