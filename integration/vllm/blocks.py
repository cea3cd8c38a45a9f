"""vLLM's block pool: its blocks, its queue of free blocks, and what happens to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from operator import attrgetter
from typing import Any

from vcache_backend.vram_pool.generations import VOID, Generations

log = logging.getLogger("vllm.vcache")
NUMBERS = "I"
"""Type code of `array` for block numbers. Slicing an array copies bytes; slicing a list touches
every number."""
_HASH = attrgetter("_block_hash")


class KVBlocks:
    """The scheduler half's access to vLLM's `BlockPool`: blocks by number, and the queue of free
    blocks. Runs in the scheduler's thread."""

    def __init__(
        self,
        pool: Any,
        fail: Callable[[str, Exception], None] = lambda *_: None,
        in_place: bool = True,
    ) -> None:
        """pool: vLLM's; up to five of its methods are replaced. fail: called with a reason and the
        exception if a callback raises, before vLLM goes on. Then no other instance may read this KV
        cache. in_place: others read this KV cache; otherwise no callback is called."""
        self.pool, self._fail = pool, fail
        self.failed = False
        """A callback has raised, and none is called any more."""
        self.before_taken: list[Callable[[int], None]] = []
        """Called with a number of blocks before vLLM hands them out, to move other blocks to the
        front."""
        self.on_taken: list[Callable[[Sequence[Any]], None]] = []
        """Called with blocks that vLLM has handed out, before vLLM can launch work that writes to
        them."""
        self.kept_out = set[str]()
        """Requests whose blocks do not enter vLLM's prefix cache any more."""
        self.on_cached: list[Callable[[Any, int, int, list[Any], Any], None]] = []
        """Called with a request, a block table, the number of a block in it, this block and those
        behind it that vLLM has just put into its prefix cache, and vLLM's mask of them: the steps
        being planned write them, or a load has. vLLM leaves out null blocks, and those that a mask
        leaves out."""
        self.before_evicted: list[Callable[[Iterable[int]], None]] = []
        """Called with blocks that vLLM, or `evict`, takes out of the prefix cache."""
        self.before_reset: list[Callable[[], None]] = []
        """Called before a reset of the prefix cache, even if vLLM then declines: the caller changes
        the weights in any case."""
        self.on_emptied: list[Callable[[], None]] = []
        """Called once vLLM has reset the prefix cache: it holds no block, and no request does."""
        self._get, self._cache = pool.get_new_blocks, pool.cache_full_blocks
        self._evict, self._reset = pool.evict_blocks, pool.reset_prefix_cache
        pool.cache_full_blocks = self._cache_full_blocks
        if in_place:
            pool.get_new_blocks, pool.evict_blocks = self._get_new_blocks, self._evict_blocks
            pool.reset_prefix_cache = self._reset_prefix_cache
        # Not every supported vLLM caches parts of blocks.
        self._cache_part = getattr(pool, "cache_partial_block", None)
        if self._cache_part is not None:
            pool.cache_partial_block = self._cache_partial_block

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
        """How many of the next blocks, at most `most`, are not in vLLM's prefix cache. vLLM puts
        such blocks in front of all others, so not every block is looked at."""
        count, block = 0, self._first
        if block.block_hash is not None:
            return 0
        hop, most = _behind(64), min(most, self.pool.free_block_queue.num_free_blocks)
        while count + 64 < most and (far := hop(block)).block_hash is None:
            count, block = count + 64, far
        while count < most and block.block_hash is None:
            count += 1
            block = block.next_free_block
        return count

    def together(self, first: int, last: int, length: int) -> bool:
        """Whether `length` free blocks, from `first` to `last`, lie one behind the other in the
        queue."""
        blocks = self.pool.blocks
        try:
            behind = _behind(length)(blocks[first])
        except AttributeError:
            return False
        return behind is not None and behind is blocks[last].next_free_block

    def move(self, first: int, last: int, behind: Any) -> Any:
        """Make vLLM hand these blocks out right after the block `behind`, or first if `behind` is
        None. The blocks lie `together` in the queue. Returns the last of them, for the next call.
        """
        start, stop = self.pool.blocks[first], self.pool.blocks[last]
        behind = behind or self.pool.free_block_queue.fake_free_list_head
        before, after = start.prev_free_block, stop.next_free_block
        if before is not behind:
            follower = behind.next_free_block
            before.next_free_block, after.prev_free_block = after, before
            behind.next_free_block, start.prev_free_block = start, behind
            stop.next_free_block, follower.prev_free_block = follower, stop
        return stop

    def free_last(self, number: int) -> bool:
        """Make vLLM hand a free block out after all that are free now. False if a request has the
        block."""
        queue, block = self.pool.free_block_queue, self.pool.blocks[number]
        if block.ref_cnt:
            return False
        last = queue.fake_free_list_tail.prev_free_block
        if last is not block:
            self.move(number, number, last)
        return True

    @property
    def _first(self) -> Any:
        return self.pool.free_block_queue.fake_free_list_head.next_free_block

    def guard(self, acts: Iterable[Callable[..., object]], *arguments: Any) -> None:
        """Call `acts`. vLLM's own result and exceptions pass through, ours do not."""
        try:
            for act in acts:
                if not self.failed:
                    act(*arguments)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises into vLLM
            self.failed = True
            self._fail(f"watching vLLM's blocks: {type(error).__name__}: {error}", error)

    def _get_new_blocks(self, num_blocks: int) -> Any:
        self.guard(self.before_taken, num_blocks)
        blocks = self._get(num_blocks)
        self.guard(self.on_taken, blocks)
        return blocks

    def _evict_blocks(self, block_ids: Any) -> Any:
        self.guard(self.before_evicted, block_ids)
        return self._evict(block_ids)

    def _reset_prefix_cache(self) -> Any:
        self.guard(self.before_reset)
        done = self._reset()
        self.guard(self.on_emptied if done else ())
        return done

    def _cache_full_blocks(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
    ) -> None:
        if request.request_id in self.kept_out:
            return
        first, stop, table = num_cached_blocks, num_full_blocks, kv_cache_group_id
        self._cache(request, blocks, first, stop, block_size, table, block_mask)
        if self.on_cached and first < stop:
            self.guard(self.on_cached, request, table, first, blocks[first:stop], block_mask)

    def _cache_partial_block(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """None: nothing was cached."""
        if request.request_id in self.kept_out or self._cache_part is None:
            return None
        return self._cache_part(request, *args, **kwargs)


def hashes_of(blocks: Sequence[Any]) -> list[Any]:
    """vLLM's hash of each block, or None."""
    try:
        # A fifth of the time of the property of that name.
        return list(map(_HASH, blocks))
    except AttributeError:
        return [block.block_hash for block in blocks]


class TrackedBlockPool:
    """Voids the generations of blocks before vLLM may write to them, or their bytes change meaning.
    Runs in the scheduler's thread."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.resets = self.evicted = 0
        """How often all blocks were voided, and how often vLLM has evicted blocks."""
        self.stale = False
        """vLLM's prefix cache, or a request, may hold parts of blocks from before a reset. A part
        has no generation."""
        self._held: Callable[[], bool] = lambda: False
        self._kept: set[int] | None = None
        """None until the first."""
        self._blocks: KVBlocks
        # The null block included: a block holds a request's bytes only after it was handed out and
        # written.
        generations.void_all()

    def watch(self, blocks: KVBlocks) -> None:
        """Watch vLLM's pool. ValueError if pool and KV cache differ in size."""
        count, theirs = self._generations.blocks, blocks.pool.num_gpu_blocks
        if theirs != count:
            raise ValueError(f"vLLM's pool has {theirs} blocks, its KV cache {count}")
        blocks.on_taken.append(self._void_taken)
        blocks.before_evicted.append(self._void_evicted)
        blocks.before_reset.append(self.void_all)
        blocks.on_emptied.append(self._emptied)
        self._held, self._blocks = lambda: bool(blocks.held), blocks

    def keep(self, number: int) -> None:
        """Have vLLM hand this block of a running request out as late as blocks in its prefix cache,
        where it has no hash, instead of first of all."""
        if self._kept is None:
            self._kept = set()
            self._blocks.before_taken.insert(0, self._hand_out_last)
        self._kept.add(number)

    def _hand_out_last(self, _: int) -> None:
        if self._kept:
            self._kept = {one for one in self._kept if not self._blocks.free_last(one)}

    def void_all(self) -> None:
        """Void all blocks: the bytes stay, but their meaning changes."""
        # First of all: what follows may raise.
        self._generations.void_all()
        self.resets += 1
        self.stale = self.stale or self._held()

    def _emptied(self) -> None:
        self.stale = False

    def _void_taken(self, blocks: Sequence[Any]) -> None:
        memory = self._generations.counters.data
        for block in blocks:
            memory[block.block_id] = VOID

    def _void_evicted(self, blocks: Iterable[int]) -> None:
        """After a failed load vLLM computes into these blocks without handing them out again."""
        self.evicted += 1
        self._generations.void(list(blocks))


@lru_cache(maxsize=8)
def _behind(length: int) -> Callable[[Any], Any]:
    """Return a function that maps a block to the block `length` places behind it in vLLM's free
    queue. AttributeError if the queue ends before."""
    # One C call follows the links in a tenth of the time of a Python loop.
    return attrgetter(".".join(["next_free_block"] * length))
