"""Keeps blocks that other instances read as if vLLM had used them itself: they go to the end of its
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

from .replicas import Run
from .resident_pool import KVBlocks

log = logging.getLogger("vllm.vcache")

MOST_BLOCKS = 256
"""Blocks moved in one step, which takes a quarter of a millisecond."""
MOST_WAITING = 16
"""Heartbeats whose hints may wait for the next step. Chunks whose hint is dropped leave the cache
earlier.
"""


def tell(outbox: Outbox | None, keys: list[ChunkKey], first: int, residents: Iterable[Run]) -> None:
    """Tell the owners of these chunks, in the background, that a load reads them. residents:
    numbered from the request's chunk `first` on.

    The hint names the whole prefix, since the chunks are useless without those before them.
    """
    ends = {run.instance: first + run.first + run.count for run in residents}
    if outbox is not None:
        for owner, end in ends.items():
            outbox.hint(owner, keys[:end])


class Hints:
    """Hints that an instance has received about its own blocks. `hear` may be called in any thread,
    the rest in the scheduler's.
    """

    def __init__(self, blocks: KVBlocks, generations: Generations, each: int) -> None:
        """each: blocks of a chunk."""
        self._blocks, self._generations, self._each = blocks, generations, each
        self._waiting: deque[tuple[UInt32s, UInt64s]] = deque()
        self._left = MOST_BLOCKS

    def hear(self, heard: Heard) -> None:
        """Note chunks that others have read, for the next `apply`."""
        if not heard.blocks or len(self._waiting) >= MOST_WAITING:
            return
        blocks = np.frombuffer(heard.blocks, dtype="<u4").reshape(-1, self._each)
        generations = np.frombuffer(heard.generations, dtype="<u8").reshape(-1, self._each)
        # A chunk's last block first: a prefix should leave the cache from its end.
        self._waiting.append((blocks[:, ::-1].reshape(-1), generations[:, ::-1].reshape(-1)))

    def planned(self) -> None:
        """A step is planned: the next one may move `MOST_BLOCKS` again."""
        self._left = MOST_BLOCKS

    def apply(self) -> None:
        """Move blocks that are unused here, and still hold what was read, to the end of vLLM's free
        queue. At most `MOST_BLOCKS` a step, however often it is called. Never raises."""
        if not self._waiting or not self._left:
            return
        try:
            self._move(*self._waiting.popleft())
        except Exception:  # vLLM goes on with whatever order there is
            self._waiting.clear()
            log.exception(
                "vcache: blocks that other instances have read are not kept longer than others"
            )

    def _move(self, blocks: UInt32s, generations: UInt64s) -> None:
        left = self._left
        if len(blocks) > left:
            self._waiting.appendleft((blocks[left:], generations[left:]))
        blocks, generations = blocks[:left], generations[:left]
        self._left -= len(blocks)
        same = self._generations.counters[blocks] == generations
        self._blocks.to_end(blocks[same].tolist())
