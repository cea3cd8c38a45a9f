"""The part of vLLM's block pool that our code wraps, for instances of the in-place campaign that do
not run vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, repr=False)
class Block:
    """A block, with the attributes that our wrapper of vLLM's pool uses."""

    block_id: int
    prev_free_block: Block | None = None
    next_free_block: Block | None = None


class FreeQueue:
    """vLLM's queue of free blocks, as far as our code uses it."""

    def __init__(self) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head, self._tail = Block(-1), Block(-1)
        self.fake_free_list_head.next_free_block = self._tail
        self._tail.prev_free_block = self.fake_free_list_head

    def append(self, block: Block) -> None:
        last = self._tail.prev_free_block
        assert last is not None
        block.prev_free_block, block.next_free_block = last, self._tail
        last.next_free_block = self._tail.prev_free_block = block
        self.num_free_blocks += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev_free_block, block.next_free_block
        assert before is not None
        assert after is not None
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks -= 1


class BlockPool:
    """vLLM's block pool, as far as our code wraps it. Hands out the block that was free for the
    longest time first.
    """

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(number) for number in range(blocks)]
        self.free_block_queue = FreeQueue()
        self.free_blocks(range(blocks))

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken = []
        for _ in range(num_blocks):
            block = self.free_block_queue.fake_free_list_head.next_free_block
            assert block is not None
            self.free_block_queue.remove(block)
            taken.append(block)
        return taken

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Nothing: the blocks' owners will write them again."""

    def reset_prefix_cache(self) -> bool:
        return True

    def free_blocks(self, blocks: Sequence[int]) -> None:
        for number in blocks:
            self.free_block_queue.append(self.blocks[number])
