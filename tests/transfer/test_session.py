"""A session's KV caches: bound as they are now, and refused unless the layout says the same."""

from __future__ import annotations

import pytest
import torch
from engine_cases import ROOMY, Node, Pair, fresh, get, pair, put, said
from kv_cases import CHUNK, FLASH, SMALL, Cache, layout_of, prompt
from processes import SECONDS

from vcache_backend.errors import LayoutError

__all__ = ["fresh", "pair"]


# ---- the bytes


def test_a_layer_replaced_between_two_calls_is_the_one_that_is_read_and_written(pair: Pair) -> None:
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    for cache, other in ((pair.mine, Cache()), (pair.theirs, Cache())):
        for name in ("memory", "tensors", "rows"):
            parts, others = getattr(cache, name), getattr(other, name)
            parts[1], others[1] = others[1], parts[1]
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(2 * CHUNK, 2))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK, 2)) == 2 * CHUNK


def test_no_view_is_written_beyond_its_end(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    tokens, half = prompt(2 * CHUNK), SMALL.blocks // 2
    put(pair.writer, pair.mine, tokens)
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    pair.theirs.poison()
    view = [tensor[:, :half] for tensor in pair.theirs.tensors]
    slots = torch.arange(2 * CHUNK) + half * SMALL.block_size
    for _ in range(2):
        assert not pair.reader.retrieve(tokens, None, view, slots).any()
        assert pair.theirs.holds_only(tokens[:0], slots[:0])
        pair.reader.store(prompt(2 * CHUNK, 2), None, view, slots)
        assert pair.reader.flush(SECONDS)
    (load,) = said(caplog, "load failed")
    assert f"blocks {half} to {half + 3} but the KV cache has {half} blocks" in load
    assert len(said(caplog, "store failed")) == 1
    (segment,) = pair.reader.get_stats()["server"]["segments"].values()
    assert segment["used"] == 2 * pair.mine.chunk_bytes, "nothing is stored or kept for it"


# ---- segments and layouts


def test_kv_caches_that_are_not_what_the_layout_says_are_refused(fresh: Node) -> None:
    mine, planted = Cache(), Cache(FLASH._replace(dtype=torch.float16))
    writer = fresh.engine("host:a", ROOMY, layout_of(mine))
    liar = fresh.engine("host:b", 0, layout_of(mine))
    with pytest.raises(LayoutError, match="the layout says 3 of"):
        liar.register(planted.tensors)
    put(writer, mine, prompt(2 * CHUNK))
    said = "but the layout says 3 of part2.token16.head4.dim16 bfloat16"
    with pytest.raises(ValueError, match=said):
        put(liar, planted, prompt(2 * CHUNK, 2))
    with pytest.raises(ValueError, match=said):
        get(liar, planted, prompt(2 * CHUNK))
    assert writer.lookup(prompt(2 * CHUNK, 2)) == 0
