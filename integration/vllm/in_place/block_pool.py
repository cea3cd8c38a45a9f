"""Watches vLLM's block pool: changes a block's generation before the block may be written again, or
the bytes change meaning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from operator import attrgetter
from typing import Any

from vcache_backend.vram_pool.generations import VOID, Generations

log = logging.getLogger("vllm.vcache")
NUMBERS, GENERATIONS = "I", "Q"
"""Type codes of `array` for block numbers and generations. Slicing an array copies bytes; slicing a
list touches every number."""


class KVBlocks:
    """The scheduler half's access to vLLM's `BlockPool`: blocks by number, and the queue of free
    blocks. Runs in the scheduler's thread. Only this module touches vLLM's pool.

    pool: vLLM's pool; `get_new_blocks` is replaced. give_way: called with a number of blocks before
    vLLM hands them out, to move other blocks to the front. on_taken: called with blocks that vLLM
    has handed out, before vLLM can launch work that writes to them. failed: a callback has raised,
    and none is called any more."""

    def __init__(self, pool: Any, fail: Callable[[str, Exception], None] = lambda *_: None) -> None:
        """fail: called with a reason and the exception if a callback raises, before vLLM goes on.
        Then no other instance may read this KV cache."""
        self.pool, self.failed, self._fail = pool, False, fail
        self.give_way: Callable[[int], None] = lambda count: None
        self.on_taken: list[Callable[[Sequence[Any]], None]] = []
        self._get, self._evict = pool.get_new_blocks, pool.evict_blocks
        pool.get_new_blocks = self._get_new_blocks

    @property
    def count(self) -> int:
        """The number of blocks, with the null block."""
        return int(self.pool.num_gpu_blocks)

    @property
    def free(self) -> int:
        """The number of blocks that can be handed out."""
        return int(self.pool.get_num_free_blocks())

    def cached(self, block_hash: Any) -> bool:
        """Whether vLLM's prefix cache has this block, of a model with one block table."""
        return bool(self.pool.get_cached_block(block_hash, [0]))

    def evict(self, numbers: set[int]) -> None:
        """Take blocks out of vLLM's prefix cache."""
        self.pool.evict_blocks(numbers)

    def evict_hashed(self, hashes: Iterable[Any], tables: int) -> None:
        """Take all blocks with these hashes out of vLLM's prefix cache. tables: the number of block
        tables."""
        for block_hash, table in product(hashes, range(tables)):
            evicted = None
            while (found := self.pool.get_cached_block(block_hash, [table])) and found != evicted:
                self.evict({block.block_id for block in found})
                evicted = found

    @property
    def held(self) -> set[int]:
        """The blocks of requests and of vLLM's prefix cache."""
        blocks = (block for block in self.pool.blocks if not block.is_null)
        return {block.block_id for block in blocks if block.ref_cnt or block.block_hash}

    def head(self, most: int) -> list[int]:
        """The next `most` blocks that vLLM will hand out, in order."""
        numbers, block = list[int](), self._first
        end = self.pool.free_block_queue.fake_free_list_tail
        while block is not None and block is not end and len(numbers) < most:
            numbers.append(block.block_id)
            block = block.next_free_block
        return numbers

    def vacant(self, most: int) -> int:
        """How many of the next blocks, at most `most`, are not in vLLM's prefix cache."""
        count, block = 0, self._first
        end = self.pool.free_block_queue.fake_free_list_tail
        while count < most and block is not end and block.block_hash is None:
            count += 1
            block = block.next_free_block
        return count

    def together(self, first: int, last: int, length: int) -> bool:
        """Whether `length` free blocks, from `first` to `last`, lie one behind the other in the
        queue."""
        try:
            behind = _behind(length)(self.pool.blocks[first])
        except AttributeError:
            return False
        return behind is not None and behind is self.pool.blocks[last].next_free_block

    def give_up(self, first: int, last: int, evict: bool) -> None:
        """Make vLLM hand these blocks out first, which lie `together` in the queue. evict: take
        them out of vLLM's prefix cache now. vLLM does so itself when it hands a block out."""
        start, stop = self.pool.blocks[first], self.pool.blocks[last]
        head, before = self.pool.free_block_queue.fake_free_list_head, start.prev_free_block
        behind, old = stop.next_free_block, head.next_free_block
        if before is not head:
            before.next_free_block = behind
            behind.prev_free_block = before
            head.next_free_block = start
            start.prev_free_block = head
            stop.next_free_block = old
            old.prev_free_block = stop
            behind = old
        if evict:
            numbers = set[int]()
            while start is not behind:
                numbers.add(start.block_id)
                start = start.next_free_block
            self._evict(numbers)

    @property
    def _first(self) -> Any:
        return self.pool.free_block_queue.fake_free_list_head.next_free_block

    def guard(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act`. vLLM's own result and exceptions pass through, ours do not."""
        if self.failed:
            return
        try:
            act(*arguments)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises into vLLM
            self.failed = True
            self._fail(f"watching vLLM's blocks: {type(error).__name__}: {error}", error)

    def _get_new_blocks(self, num_blocks: int) -> Any:
        self.guard(self.give_way, num_blocks)
        blocks = self._get(num_blocks)
        for act in self.on_taken:
            self.guard(act, blocks)
        return blocks


class ResidentPool:
    """Watches vLLM's `BlockPool` to count generations. Runs in the scheduler's thread.

    resets: how often all blocks were voided. evicted: how often vLLM has evicted blocks."""

    def __init__(
        self, blocks: KVBlocks, generations: Generations, on_reset: Callable[[], None]
    ) -> None:
        """blocks: of a pool that has not handed out a block. on_reset: called before a reset of the
        prefix cache, even if vLLM then declines."""
        self.resets, self.evicted = 0, 0
        # Void all blocks, the null block included: a block holds a request's bytes only after it
        # was handed out and written.
        generations.void_all()
        self._generations, self._on_reset = generations, on_reset
        self._guard = blocks.guard
        blocks.on_taken.append(self._void)
        pool = blocks.pool
        self._evict = pool.evict_blocks
        self._reset = pool.reset_prefix_cache
        pool.evict_blocks = self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache

    def void_all(self) -> None:
        """Void all generations: the bytes stay, but their meaning changes."""
        self.resets += 1
        self._generations.void_all()

    def _void(self, blocks: Sequence[Any]) -> None:
        """Change the blocks' generations: see `KVBlocks.on_taken`."""
        counters = self._generations.counters.data
        for block in blocks:
            counters[block.block_id] = VOID

    def _evict_blocks(self, block_ids: Any) -> Any:
        """Void blocks that vLLM evicts: after a failed load vLLM recomputes into these blocks
        without allocating them again."""
        self.evicted += 1
        self._guard(lambda: self._generations.void(list(block_ids)))
        return self._evict(block_ids)

    def _reset_prefix_cache(self) -> Any:
        """Void all blocks even if vLLM cannot reset its cache now: the caller changes the weights
        in any case."""
        self._guard(self.void_all)
        self._guard(self._on_reset)
        return self._reset()


@lru_cache(maxsize=8)
def _behind(length: int) -> Callable[[Any], Any]:
    """Return a function that maps a block to the block `length` places behind it in vLLM's free
    queue. AttributeError if the queue ends before."""
    # One C call follows the links in a tenth of the time of a Python loop.
    return attrgetter(".".join(["next_free_block"] * length))
