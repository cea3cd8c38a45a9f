"""Layouts: all that separates namespaces, and what cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from kv_cases import ARRANGEMENTS, CHUNK, Cache, layout_of
from test_keys import LAYOUT, hasher

from vcache_backend.errors import LayoutError
from vcache_backend.transfer.layout import Layout


@pytest.mark.parametrize("field", [name for name in LAYOUT.__struct_fields__ if name != "extra"])
def test_every_field_of_the_layout_separates_namespaces(field: str) -> None:
    value = getattr(LAYOUT, field)
    changed = 2 * value + (field == "pp_rank") if isinstance(value, int) else f"{value}!"
    other = msgspec.structs.replace(LAYOUT, **{field: changed})
    assert other.namespace() != LAYOUT.namespace()
    # Were only the first eight bytes different, a namespace whose prefix collides would share the
    # other's chunks.
    ours, theirs = hasher().keys(range(4))[0], hasher(other).keys(range(4))[0]
    assert ours[:8] == LAYOUT.namespace().prefix != theirs[:8]
    assert ours[8:24] != theirs[8:24]


def test_what_an_adapter_adds_separates_namespaces() -> None:
    added = [{}, {"lora": "a"}, {"lora": "b"}, {"lora": "a", "s": "t"}, {"lora": "a\ns", "t": ""}]
    spaces = {msgspec.structs.replace(LAYOUT, extra=extra).namespace() for extra in added}
    assert len(spaces) == 5


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
