"""The places of a request's blocks: which are moved, counted and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.errors import LayoutError
from vcache_backend.transfer.places import BlockPlaces, SlotPlaces, whole_blocks
from vcache_backend.vram_pool.copies.geometry import (
    Int64s,
    PagedKV,
    Share,
    chunk_planes,
    placed,
    slot_rows,
)

BLOCK = 4
CHUNK = 16
LAYERS = [torch.zeros((2, 32, BLOCK, 2, 6), dtype=torch.float16) for _ in range(3)]
KV = PagedKV.describe(LAYERS, BLOCK)
"""4 blocks of 4 tokens a chunk."""


def places(*ids: int) -> Int64s:
    """A slot mapping of whole blocks in order."""
    return (np.array(ids, dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)


def test_with_several_tables_an_unwanted_block_is_no_place_and_its_chunk_is_not_stored() -> None:
    several = replace(KV, shares=(Share(BLOCK), Share(BLOCK, 2 * BLOCK)))
    at = BlockPlaces(several, CHUNK, [5, 0, 7, -1, 4, -1], 2 * BLOCK)
    plan = at.load_plan(1, 6)
    assert plan.numbers.tolist() == [2, 3, 4, 5, 8, 9]
    assert plan.ids.tolist() == [0, 1, 14, 15, 8, 9]
    # Of a chunk's six blocks of the tensors, the first four are the first table's.
    assert at.tokens(plan.numbers) == 4 * BLOCK
    assert [at.after(block) for block in (0, 3, 5)] == [0, 4, 6]
    assert [at.chunks(blocks) for blocks in (2, 3, 5, 6)] == [0, 1, 1, 2]
    assert [at.holds(chunk) for chunk in (0, 1, 2)] == [True, False, False]


def test_only_leading_blocks_count_as_tokens_if_told_so() -> None:
    several = replace(KV, shares=(Share(BLOCK), Share(BLOCK, 2 * BLOCK)))
    at = BlockPlaces(several, CHUNK, [5, 0, -1, 7, 3, 4, 1], BLOCK, counted=4)
    plan = at.load_plan(0, 7)
    assert (plan.ids.tolist(), at.tokens(plan.numbers)) == ([5, 0, 7, 3, 4, 1], 3 * BLOCK)


@pytest.mark.parametrize("bad", [32 * BLOCK, -2, 1 << 40])
def test_a_place_outside_of_the_cache_is_refused_with_figures(bad: int) -> None:
    mapping = places(7, 3, 30, 4)
    mapping[5] = bad
    said = r"names blocks .* but the KV cache has 32 blocks of 4 tokens"
    with pytest.raises(LayoutError, match=said):
        SlotPlaces(KV, CHUNK, mapping, range(0, CHUNK, CHUNK)).load_plan(0, CHUNK // BLOCK)
    for ids in ([7, 3, 32, 4], [7, 3, -1, 4]):
        with pytest.raises(LayoutError, match=said):
            placed(KV, np.array(ids))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Int64s, Sequence[int], int]:
    """Mostly whole blocks, with holes, shuffled tokens and shifted runs; several chunks; tokens to
    be left alone.
    """
    chunks = draw(st.integers(1, 3))
    ids = draw(st.permutations(range(32)))[: chunks * CHUNK // BLOCK + 1]
    mapping = places(*ids)[draw(st.sampled_from([0, 0, 1, 3, 4])) :][: chunks * CHUNK]
    for at in draw(st.lists(st.integers(0, len(mapping) - 2), max_size=4)):
        mapping[[at, at + 1]] = mapping[[at + 1, at]]
    for at in draw(st.lists(st.integers(0, len(mapping) - 1), max_size=3)):
        mapping[at] = -1
    starts = range(draw(st.integers(0, chunks - 1)) * CHUNK, chunks * CHUNK, CHUNK)
    either = draw(st.sampled_from([starts, list(starts)]))
    return mapping, either, draw(st.sampled_from([0, 0, *range(len(mapping))]))


@pytest.mark.parametrize("whole", [False, True])
@given(requests())
def test_a_block_is_moved_if_and_only_if_it_is_wanted_whole_and_lies_in_one_block(
    whole: bool, request_: tuple[Int64s, Sequence[int], int]
) -> None:
    """`whole`: it begins with the block that the first wanted token is in, and all that is wanted
    must have a place.
    """
    mapping, starts, skip = request_
    at = SlotPlaces(KV, CHUNK, mapping, starts, skip, whole=whole)
    rows = []
    covered = np.zeros(len(mapping), dtype=np.bool_)
    skip, lacks = skip // BLOCK * BLOCK if whole else skip, False
    for slot, start in enumerate(starts):
        for virtual in range(CHUNK // BLOCK):
            first = start + virtual * BLOCK
            here = mapping[first : first + BLOCK].tolist()
            one_block = here == list(range(here[0], here[0] + BLOCK)) and here[0] % BLOCK == 0
            if first >= skip and here[0] >= 0 and one_block:
                rows.append([slot * CHUNK // BLOCK + virtual, here[0] // BLOCK])
                covered[first : first + BLOCK] = True
            elif first >= skip:
                lacks = True
    full = [bool(covered[start : start + CHUNK].all()) for start in starts]
    assert [at.holds(chunk) for chunk in range(len(starts))] == full
    if whole and lacks:
        with pytest.raises(LayoutError, match="names blocks -1 to"):
            at.load_plan(0, at.total)
        return
    assert list(map(list, zip(*at.load_plan(0, at.total), strict=True))) == rows
    wanted = [number for number, _ in rows]
    following = [next((n for n in wanted if n >= one), at.total) for one in range(at.total)]
    assert [at.after(one) for one in range(at.total)] == following
    assert at.loaded(len(starts)).tolist() == covered.tolist()
    if not whole:
        stored = [chunk for chunk, holds in enumerate(full) if holds]
        blocks, _ = at.store_rows(stored, [0] * len(stored))
        kept = [block for number, block in rows if number // (CHUNK // BLOCK) in stored]
        assert blocks[:, 2].tolist() == kept


@pytest.mark.parametrize("starts", [[-1], [1], [0, 16], [1 << 40]])
def test_a_chunk_outside_of_the_mapping_is_refused(starts: list[int]) -> None:
    with pytest.raises(LayoutError, match="are not in a slot mapping of 16"):
        whole_blocks(KV, CHUNK, places(1, 2, 3, 4), starts)


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
