"""The planner: what becomes a block copy, what a token copy, what stays out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.planner import CopyPlan, Int64s, Piece, TokenGeometry, plan

BLOCK = 4
CHUNK = 16
PAGE = 96
TWO_RUNS = TokenGeometry(runs=2, run_bytes=12, run_stride=48, token_stride=12)


@dataclass(frozen=True)
class Sizes:
    """4 blocks of 4 tokens a chunk; a token's page share is 2 runs of 12 bytes."""

    layers: int = 3
    parts: int = 2
    page_bytes: int = PAGE
    block_size: int = BLOCK
    num_blocks: int = 32
    tokens: TokenGeometry | None = TWO_RUNS


WHOLE_BLOCKS_ONLY = Sizes(tokens=None)
VIRTUAL_BYTES = 2 * PAGE


def places(*ids: int) -> Int64s:
    """A slot mapping of whole blocks in order."""
    return (np.array(ids, dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)


def moved(copy: CopyPlan, mapping: Int64s) -> list[tuple[int, int, int]]:
    """Every token the plan moves, as (slot, byte offset in the slot, place in the KV cache), from its rows alone."""
    found = []
    for slot, offset, block in copy.blocks.tolist():
        found += [(slot, offset + t * 12, block * BLOCK + t) for t in range(BLOCK)]
    for slot, offset, block, inside in copy.tokens.tolist():
        assert inside % 12 == 0
        found.append((slot, offset, block * BLOCK + inside // 12))
    return found


def expected(mapping: Int64s, pieces: list[Piece]) -> list[tuple[int, int, int]]:
    found = []
    for slot, first, start, stop in pieces:
        for token in range(start, stop):
            place = int(mapping[first + token])
            if place != -1:
                found.append((slot, token // BLOCK * VIRTUAL_BYTES + token % BLOCK * 12, place))
    return found


def test_whole_chunks_in_whole_blocks_are_block_copies_only() -> None:
    copy = plan(Sizes(), CHUNK, places(7, 3, 30, 4, 0, 31, 9, 8), [Piece(0, 0, 0, CHUNK), Piece(1, CHUNK, 0, CHUNK)])
    assert copy.blocks.tolist() == [
        [0, 0, 7],
        [0, 192, 3],
        [0, 384, 30],
        [0, 576, 4],
        [1, 0, 0],
        [1, 192, 31],
        [1, 384, 9],
        [1, 576, 8],
    ]
    assert copy.tokens.shape == (0, 4)
    assert copy.nbytes == 2 * 3 * 2 * 4 * PAGE
    assert copy.covered(2 * CHUNK).all()
    assert copy.complete(2).tolist() == [True, True]


def test_where_tokens_cannot_be_addressed_a_partial_block_stays_out_and_does_not_count() -> None:
    copy = plan(WHOLE_BLOCKS_ONLY, CHUNK, places(7, 3, 30, 4), [Piece(0, 0, 6, CHUNK)])
    assert copy.blocks.tolist() == [[0, 384, 30], [0, 576, 4]]
    assert not len(copy.tokens)
    assert copy.covered(CHUNK).tolist() == [False] * 8 + [True] * 8


def test_a_mapping_may_begin_inside_a_chunk() -> None:
    mapping = places(9, 10)
    copy = plan(Sizes(), CHUNK, mapping, [Piece(0, -8, 8, CHUNK)])
    assert copy.blocks.tolist() == [[0, 384, 9], [0, 576, 10]]
    assert copy.covered(8).all()


def test_nothing_wanted_is_an_empty_plan() -> None:
    for copy in (plan(Sizes(), CHUNK, places(), []), plan(Sizes(), CHUNK, places(1, 2, 3, 4), [Piece(0, 0, 7, 7)])):
        assert (len(copy.blocks), len(copy.tokens), copy.nbytes) == (0, 0, 0)


@pytest.mark.parametrize("bad", [32 * BLOCK, -2, 1 << 40])
def test_a_place_outside_of_the_cache_is_refused_with_figures(bad: int) -> None:
    mapping = places(7, 3, 30, 4)
    mapping[5] = bad
    for sizes in (Sizes(), WHOLE_BLOCKS_ONLY):
        with pytest.raises(LayoutError, match=r"names blocks .* but the KV cache has 32 blocks of 4 tokens"):
            plan(sizes, CHUNK, mapping, [Piece(0, 0, 0, CHUNK)])


def test_places_outside_of_the_wanted_range_are_not_looked_at() -> None:
    mapping = places(99, 3, 30, 4)
    assert plan(Sizes(), CHUNK, mapping, [Piece(0, 0, 4, CHUNK)]).blocks[:, 2].tolist() == [3, 30, 4]


@pytest.mark.parametrize(
    "piece",
    [Piece(-1, 0, 0, 16), Piece(0, 0, -1, 16), Piece(0, 0, 8, 4), Piece(0, 0, 0, 17), Piece(0, 1, 0, 16), Piece(0, -1, 0, 16)],
)
def test_a_piece_outside_of_its_chunk_or_mapping_is_refused(piece: Piece) -> None:
    with pytest.raises(LayoutError, match="is outside of its chunk of 16 tokens or of a slot mapping of 16"):
        plan(Sizes(), CHUNK, places(1, 2, 3, 4), [Piece(3, 0, 0, 4), piece])


def test_overlapping_pieces_of_one_slot_are_refused_and_adjacent_ones_are_not() -> None:
    mapping = places(1, 2, 3, 4)
    copy = plan(Sizes(), CHUNK, mapping, [Piece(0, 0, 6, 16), Piece(0, 0, 0, 6)])
    assert sorted(moved(copy, mapping)) == sorted(expected(mapping, [Piece(0, 0, 0, 16)]))
    assert copy.complete(1).all()
    with pytest.raises(LayoutError, match="overlap"):
        plan(Sizes(), CHUNK, mapping, [Piece(0, 0, 6, 16), Piece(0, 0, 0, 7)])


@pytest.mark.parametrize("chunk_size", [0, -4, 6])
def test_a_chunk_must_be_whole_blocks(chunk_size: int) -> None:
    with pytest.raises(LayoutError, match="no multiple of the KV block size 4"):
        plan(Sizes(), chunk_size, places(1), [])


@st.composite
def requests(draw: st.DrawFn) -> tuple[Int64s, list[Piece]]:
    """Mostly whole blocks, with holes, shuffled tokens and shifted runs; pieces of several chunks."""
    chunks = draw(st.integers(1, 3))
    ids = draw(st.permutations(range(32)))[: chunks * CHUNK // BLOCK + 1]
    mapping = places(*ids)[draw(st.integers(0, BLOCK)) :][: chunks * CHUNK]
    for at in draw(st.lists(st.integers(0, len(mapping) - 2), max_size=4)):
        mapping[[at, at + 1]] = mapping[[at + 1, at]]
    for at in draw(st.lists(st.integers(0, len(mapping) - 1), max_size=3)):
        mapping[at] = -1
    pieces = []
    for slot in range(chunks):
        start = draw(st.integers(0, CHUNK))
        pieces.append(Piece(slot, slot * CHUNK, start, draw(st.integers(start, CHUNK))))
    return mapping, pieces


@given(requests())
def test_every_wanted_token_with_a_place_is_moved_exactly_once(request_: tuple[Int64s, list[Piece]]) -> None:
    mapping, pieces = request_
    copy = plan(Sizes(), CHUNK, mapping, pieces)
    wanted = expected(mapping, pieces)
    assert sorted(moved(copy, mapping)) == sorted(wanted)
    assert copy.nbytes == len(wanted) * 3 * 2 * 24
    indices = {p.first + t for p in pieces for t in range(p.start, p.stop) if mapping[p.first + t] != -1}
    assert set(np.flatnonzero(copy.covered(len(mapping))).tolist()) == indices


@given(requests())
def test_a_block_is_one_copy_if_and_only_if_it_is_wanted_whole_and_lies_in_one_block(
    request_: tuple[Int64s, list[Piece]],
) -> None:
    mapping, pieces = request_
    whole = []
    for slot, first, start, stop in pieces:
        for virtual in range(CHUNK // BLOCK):
            tokens = range(virtual * BLOCK, (virtual + 1) * BLOCK)
            ids = [int(mapping[first + t]) for t in tokens if start <= t < stop]
            if len(ids) == BLOCK and ids[0] % BLOCK == 0 and ids == list(range(ids[0], ids[0] + BLOCK)):
                whole.append([slot, virtual * VIRTUAL_BYTES, ids[0] // BLOCK])
    for sizes in (Sizes(), WHOLE_BLOCKS_ONLY):
        assert plan(sizes, CHUNK, mapping, pieces).blocks.tolist() == whole


@given(requests())
def test_a_slot_is_complete_if_and_only_if_all_its_tokens_move(request_: tuple[Int64s, list[Piece]]) -> None:
    mapping, pieces = request_
    for sizes in (Sizes(), WHOLE_BLOCKS_ONLY):
        copy = plan(sizes, CHUNK, mapping, pieces)
        moves = [slot for slot, _, _ in moved(copy, mapping)]
        assert copy.complete(3).tolist() == [moves.count(slot) == CHUNK for slot in range(3)]
