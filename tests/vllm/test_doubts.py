"""Which blocks are untrusted beside vLLM's own block pool, and for how long."""

from __future__ import annotations

from math import inf

import pytest

pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vcache_backend.integration.doubts import BlockTables, UntrustedBlocks, beginning
from vcache_backend.integration.vllm.in_place.block_pool import KVBlocks


def begin(
    blocks: UntrustedBlocks,
    *rows: BlockTables,
    cached: CachedRequestData | None = None,
    before: BlockTables = (),
) -> None:
    """A step in which requests begin with these blocks. before: of those that do not."""
    nothing = {"mm_features": [], "sampling_params": None, "pooling_params": None}
    nothing |= {"prompt_token_ids": None, "num_computed_tokens": 0, "lora_request": None}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData("", block_ids=row, **nothing) for row in rows]
    output.scheduled_cached_reqs = cached or output.scheduled_cached_reqs
    blocks.follow(output, beginning(output), lambda _: before)


def test_a_block_is_untrusted_until_its_own_step_ends_whoever_has_the_block_by_then() -> None:
    blocks, pool = UntrustedBlocks(), BlockPool(8, enable_caching=True, hash_block_size=4)
    blocks.watch(KVBlocks(pool))
    blocks.add([1, 2], 6)
    blocks.add([2], 5)
    blocks.add([3])
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    assert blocks.end_steps({5}, set()) == set()
    assert [blocks.untrusted_until([[block]]) for block in (1, 2, 3)] == [6, 6, 0]
    assert blocks.end_steps({6}, {1}) == {1, 2}
    assert blocks.untrusted_until([[2]]) == 0


def test_what_lies_before_an_untrusted_block_is_right_where_there_is_one_table() -> None:
    """And whatever order requests are listed in. With several tables nothing of it is; vLLM's null
    block is never untrusted."""
    blocks = UntrustedBlocks()
    blocks.add([0, 2])
    begin(blocks, [[4, 5]], [[1, 2, 3, 4]])
    assert [blocks.untrusted_until([[block]]) for block in (1, 2, 3, 4, 5)] == [0, *[inf] * 4]
    begin(blocks, [[0, 0, 5], [7, 8]])
    assert [blocks.untrusted_until([[block]]) for block in (0, 7, 8)] == [0, inf, inf]


def test_a_request_that_comes_back_with_other_blocks_is_not_untrusted() -> None:
    blocks = UntrustedBlocks()
    blocks.add([1])
    back = CachedRequestData.make_empty()
    back.req_ids, back.num_computed_tokens, back.new_block_ids = ["r"], [0], [([2],)]
    for resumed, end in (({"r"}, 0), (set[str](), inf)):
        back.resumed_req_ids = resumed
        begin(blocks, cached=back, before=[[1]])
        assert blocks.untrusted_until([[2]]) == end
