"""vLLM keeps what it uses; what others read in its KV cache is kept as long: such blocks go to the end of the free queue, too."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from vcache_backend.metadata_server.messages import ChunkKey, Heard
from vcache_backend.resident.generations import Generations, UInt32s, UInt64s
from vcache_backend.transfer.courier import Courier

from .replicas import Replica

log = logging.getLogger("vllm.vcache")

MOST_BLOCKS = 256
"""Blocks that are moved in a step, in a quarter of a millisecond."""
MOST_WAITING = 16
"""Heartbeats' worth of hints that wait for the next step; a hint that is dropped is a chunk that leaves earlier."""


def tell(courier: Courier | None, keys: list[ChunkKey], first: int, residents: Mapping[int, Replica]) -> None:
    """A load reads these chunks of a request in others' KV caches, numbered from its chunk `first` on: let their owners know, soon, of
    the whole prefix. What is before these chunks they need as much."""
    ends = {owner: first + chunk + 1 for chunk, (owner, _, _) in sorted(residents.items())}
    if courier is not None:
        for owner, end in ends.items():
            courier.hint(owner, keys[:end])


class Hints:
    """`hear` from any thread; `apply` in the scheduler's."""

    def __init__(self, pool: Any, generations: Generations, each: int) -> None:
        """pool: vLLM's `BlockPool`. each: blocks of a chunk."""
        self._pool, self._generations, self._each = pool, generations, each
        self._waiting: deque[tuple[UInt32s, UInt64s]] = deque()
        self._left = MOST_BLOCKS

    def hear(self, heard: Heard) -> None:
        """Chunks that others have read."""
        if not heard.blocks or len(self._waiting) >= MOST_WAITING:
            return
        blocks = np.frombuffer(heard.blocks, dtype="<u4").reshape(-1, self._each)
        generations = np.frombuffer(heard.generations, dtype="<u8").reshape(-1, self._each)
        # A chunk's last block first: of a prefix the head is to leave last.
        self._waiting.append((blocks[:, ::-1].reshape(-1), generations[:, ::-1].reshape(-1)))

    def planned(self) -> None:
        """What is moved from now on is moved in the next step."""
        self._left = MOST_BLOCKS

    def apply(self) -> None:
        """Make some of the blocks the last that vLLM gives away: such as nobody here uses, and still hold what was read. In a step as often
        as one likes."""
        if not self._waiting or not self._left:
            return
        try:
            self._move(*self._waiting.popleft())
        except Exception:  # vLLM goes on with whatever order there is
            self._waiting.clear()
            log.exception("vcache: what others read in this instance's KV cache is kept no longer than the rest")

    def _move(self, blocks: UInt32s, generations: UInt64s) -> None:
        left = self._left
        if len(blocks) > left:
            self._waiting.appendleft((blocks[left:], generations[left:]))
        blocks, generations = blocks[:left], generations[:left]
        self._left -= len(blocks)
        pool, queue = self._pool, self._pool.free_block_queue
        for number in blocks[self._generations.counters[blocks] == generations].tolist():
            block = pool.blocks[number]
            if not block.ref_cnt:
                queue.remove(block)
                queue.append(block)
