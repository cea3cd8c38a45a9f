"""The planner: which blocks are moved, from where, and which are left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, Share
from vcache_backend.vram_pool.copies.plan import chunk_planes, placed, slot_rows, whole_blocks

BLOCK = 4
CHUNK = 16
LAYERS = [torch.zeros((2, 32, BLOCK, 2, 6), dtype=torch.float16) for _ in range(3)]
KV = PagedKV.describe(LAYERS, BLOCK)
"""4 blocks of 4 tokens a chunk."""


def places(*ids: int) -> Int64s:
    """A slot mapping of whole blocks in order."""
    return (np.array(ids, dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)


def test_of_several_block_tables_a_chunk_has_the_blocks_of_each_one_behind_the_other() -> None:
    several = replace(KV, shares=(Share(BLOCK), Share(BLOCK, 2 * BLOCK)))
    copy = placed(several, np.array([7, 3, 30, 4, 0, 31, -1, 9, 8, -1, -1, 6]))
    rows, origins = slot_rows(several, CHUNK, copy, np.array([10_000, 50_000]))
    first = [[0, 10_000 + 192 * at, block] for at, block in enumerate((7, 3, 30, 4, 0, 31))]
    assert rows[:6].tolist() == first
    assert rows[6:].tolist() == [[0, 50_192, 9], [0, 50_384, 8], [0, 50_960, 6]]
    assert origins.tolist() == [chunk_planes(several, CHUNK).tolist()]
    with pytest.raises(LayoutError, match="names blocks -1 to 7"):
        placed(KV, np.array([7, -1]))


@pytest.mark.parametrize("starts", [[-1], [1], [0, 16], [1 << 40]])
def test_a_chunk_outside_of_the_mapping_is_refused(starts: list[int]) -> None:
    with pytest.raises(LayoutError, match="are not in a slot mapping of 16"):
        whole_blocks(KV, CHUNK, places(1, 2, 3, 4), starts)
