"""What the engine is asked that cannot be meant: a ValueError that says which, and nothing else is
ever raised.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import Node, Pair, fresh, pair
from kv_cases import ARRANGEMENTS, CHUNK, SMALL, Cache, layout_of, places, prompt
from processes import SECONDS

from vcache_backend.errors import LayoutError
from vcache_backend.transfer.layout import Layout

__all__ = ["fresh", "pair"]


# ---- arguments


def test_arguments_that_cannot_be_meant_are_errors_that_say_which(pair: Pair) -> None:
    tokens, slots, kv = prompt(CHUNK), places(pair.mine.sizes, CHUNK), pair.mine.tensors
    true = torch.ones(CHUNK, dtype=torch.bool)
    hole = true.clone()
    hole[3] = False
    calls = [
        (r"mask .*\(31,\).*expected \(32,\)", lambda e: (tokens, true[1:], kv, slots)),
        (r"mask must be False on a prefix", lambda e: (tokens, hole, kv, slots)),
        (r"slot_mapping .*\(31,\).*32 tokens", lambda e: (tokens, None, kv, slots[1:])),
        (
            rf"slot {slots[4]} to the tokens at \[4, 9\]",
            lambda e: (tokens, None, kv, slots.index_fill(0, torch.tensor([9]), slots[4])),
        ),
        (r"kvcaches .*NoneType", lambda e: (tokens, None, None, slots)),
    ]
    for pattern, arguments in calls:
        for call in (pair.writer.store, pair.writer.retrieve):
            with pytest.raises(ValueError, match=pattern):
                call(*arguments(pair.writer))
    with pytest.raises(ValueError, match=r"slot_mapping .*offset 5"):
        pair.writer.store(tokens, None, kv, slots, 5)
    assert pair.writer.get_stats()["failures"] == {}


def test_whatever_it_is_asked_an_engine_raises_only_value_error(fresh: Node, pair: Pair) -> None:
    tokens, slots, kv, e = prompt(CHUNK), places(SMALL, CHUNK), pair.mine.tensors, pair.writer
    odd: list[object] = [None, -1, 1 << 70, float("nan"), "x", b"x", [], [[1], [1, 2]], {"a": 1}]
    odd += [Cache, [None] * CHUNK, torch.tensor(1), torch.empty(CHUNK, device="meta")]
    odd += [torch.ones(CHUNK).to_sparse(), np.array([object()] * CHUNK)]
    odd += [[torch.empty_like(layer, device="meta") for layer in kv], [kv[0].to_sparse()] * 3]
    for x in odd:
        for call in (
            lambda x: (e.lookup(x), e.lookup(tokens, salt=x)),
            lambda x: e.store(x, None, kv, slots),
            lambda x: e.store(tokens, x, kv, slots),
            lambda x: e.store(tokens, None, x, slots),
            lambda x: e.store(tokens, None, kv, x),
            lambda x: e.store(tokens, None, kv, slots, x),
            lambda x: e.store(tokens, None, kv, slots, salt=x),
            lambda x: e.retrieve(x, None, kv, slots),
            lambda x: e.retrieve(tokens, x, kv, slots),
            lambda x: e.retrieve(tokens, None, x, slots),
            lambda x: e.retrieve(tokens, None, kv, x),
            lambda x: e.retrieve(tokens, None, kv, slots, salt=x),
            e.contains,
            e.keys,
            lambda x: e.keys(tokens, salt=x),
            e.flush,
        ):
            with contextlib.suppress(ValueError):
                call(x)
    assert e.flush(SECONDS)
    assert e.keys(tokens, salt=None) == e.keys(tokens)
    stats = fresh.client().stats()
    assert stats.reservations == stats.quarantined == 0


def test_a_layout_is_made_from_the_tensors() -> None:
    for arrangement in ARRANGEMENTS:
        cache = Cache(arrangement)
        more = {"model": "test", "axes": arrangement.axes, "chunk_size": CHUNK}
        of = Layout.of(cache.tensors, cache.sizes.block_size, **more)
        said = layout_of(cache, kv_heads=of.kv_heads, head_dim=of.head_dim)
        heads = cache.sizes.heads if "head" in arrangement.axes else 1
        assert (of, of.kv_heads, of.head_dim) == (said, heads, cache.tensors[0].shape[-1])
    with pytest.raises(LayoutError, match=r"no known layout.*block_size"):
        Layout.of(cache.tensors, cache.sizes.block_size + 1, model="test")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, r"layers=0.*1 or more"),
        ({"dtype": torch.float32}, r"dtype=torch.float32.*a text"),
        ({"chunk_size": CHUNK + 1}, "multiple of block_size"),
        ({"extra": {"salt": 1}}, r"extra=.*texts"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_when_made(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layout_of(Cache(), **change)
