"""Chunk keys: a key stands for its whole prefix, in its namespace, under its salt, for its rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.protocol.messages import KEY_BYTES, of_rank
from vcache_backend.transfer.keys import TokenHasher, tail_hash
from vcache_backend.transfer.layout import Layout

LAYOUT = Layout(
    model="m", dtype="bf16", layers=2, kv_heads=2, head_dim=8, block_size=16, kv_layout="x"
)


CHUNK = 4
GOLDEN = [
    "647bdb217a97961d32ab2668881c5e511e1e38ca09825b410000",
    "647bdb217a97961d1319c7aad89033826e03bfe958170a120000",
]


# Few different tokens and short sequences: equal prefixes are common.
tokens = st.lists(st.integers(0, 2), max_size=6 * CHUNK)


def hasher(layout: Layout = LAYOUT) -> TokenHasher:
    return TokenHasher(layout.namespace(), CHUNK)


def test_the_key_format_has_not_drifted() -> None:
    """A change here makes every chunk of an older server or worker unreachable: change
    PROTOCOL_VERSION with it.
    """
    keys = [key.hex() for key in hasher().keys(range(10))]
    assert keys == GOLDEN


@given(tokens, tokens)
def test_keys_are_equal_exactly_if_the_whole_prefix_is(first: list[int], second: list[int]) -> None:
    ours, theirs = hasher().keys(first), hasher().keys(second)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        assert (one == other) == (first[: i * CHUNK] == second[: i * CHUNK])
    assert len(set(ours)) == len(ours) == len(first) // CHUNK


@given(st.lists(st.integers(0, 2**32 - 1), min_size=CHUNK, max_size=3 * CHUNK))
def test_lists_arrays_and_tensors_agree(values: list[int]) -> None:
    keys = hasher().keys(values)
    assert hasher().keys(tuple(values)) == keys
    assert hasher().keys(np.array(values)) == keys
    assert hasher().keys(np.repeat(np.array(values), 2)[::2]) == keys
    assert hasher().keys(torch.tensor(values)) == keys


@given(st.lists(st.tuples(tokens, st.sampled_from([b"", b"salt"]))))
def test_what_was_hashed_before_makes_no_difference(calls: list[tuple[list[int], bytes]]) -> None:
    one = hasher()
    for values, salt in calls:
        ids = np.array(values, dtype=np.int64)
        assert one.keys(ids, salt) == hasher().keys(values, salt)
        ids += 1


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_salts_separate(salt: bytes, other: bytes) -> None:
    assert (hasher().keys(range(8), salt) == hasher().keys(range(8), other)) == (salt == other)


def test_ranks_differ_in_their_last_two_bytes_only() -> None:
    """The server answers a look-up for a whole tensor-parallel group by writing the other ranks
    into the key.
    """
    (ours,) = hasher().keys(range(4))
    (theirs,) = of_rank([ours], 258)
    assert len(ours) == KEY_BYTES
    assert ours[:-2] == theirs[:-2]
    assert (ours[-2:], theirs[-2:]) == (b"\0\0", b"\1\2")


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("value", [-1, 1 << 32, (1 << 63) - 1])
def test_a_token_beyond_32_bits_is_refused_not_taken_for_another(kind: Any, value: int) -> None:
    assert len(hasher().keys(kind([(1 << 32) - 1] * CHUNK))) == 1
    with pytest.raises(ValueError, match=rf"{value}.*expected 0 to 4294967295"):
        hasher().keys(kind([7] * (CHUNK - 1) + [value]))


def test_a_token_that_no_vocabulary_has_is_only_another_token() -> None:
    """Without a tokenizer vLLM takes any number from a client."""
    assert len({tail_hash(bytes(32), [5, token]) for token in (-1, 1, 1 << 31)}) == 3
