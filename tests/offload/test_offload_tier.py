"""The engine with a real Mooncake below its pool: two nodes, small pools, dead masters and hung
providers.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from engine_cases import Node, get, put
from kv_cases import CHUNK, FLASH, MLA, Arrangement, Cache, layout_of, prompt
from mooncake_cases import Raw, depot, hung_depot, model, needs_mooncake, raw
from mooncake_store import Depot
from offload_cases import LENGTH, ROOMY, TIER, cache_on, engine, nodes, through
from processes import SECONDS, eventually, leaving_nothing
from test_cli import vcache

from vcache_backend.config import ByteSize
from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import ServerTimeout
from vcache_backend.offload import objects, tier, transfers
from vcache_backend.protocol.messages import NAMESPACE_BYTES, ChunkKey, Present

__all__ = ["depot", "hung_depot", "model", "nodes", "raw"]


pytestmark = needs_mooncake


def test_what_the_pool_has_is_a_hit_though_nobody_says_what_is_below(
    nodes: list[Node], depot: Depot, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, cache = engine(nodes[0], depot, model), Cache()
    put(made, cache, prompt(2 * CHUNK))

    def late(keys: list[ChunkKey]) -> Present:
        raise ServerTimeout("planted")

    monkeypatch.setattr(made._session.client, "present", late)
    assert get(made, cache, prompt(LENGTH)) == 2 * CHUNK
    assert made.get_stats()["failures"] == {"fetch: ServerTimeout": 1, "late": 1}


def test_what_was_just_written_makes_room_for_others(
    nodes: list[Node], depot: Depot, model: str
) -> None:
    cache, (first, second) = Cache(), [prompt(LENGTH, number) for number in (1, 2)]
    made = engine(nodes[0], depot, model, room=LENGTH // CHUNK * cache.chunk_bytes)
    for tokens in (first, second):
        through(made, cache, tokens)
    assert [made.contains(key) for key in made.keys(second)] == [0] * (LENGTH // CHUNK)
    assert made.lookup(first) == LENGTH, "it is below"


def test_a_chunk_that_is_gone_does_not_keep_those_behind_it_from_being_written(
    nodes: list[Node], depot: Depot, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another prompt, in the same batch."""
    one, two = (engine(at, depot, model) for at in nodes)
    cache, (first, second) = Cache(), [prompt(CHUNK, number) for number in (1, 2)]
    written = transfers.Writer._copied

    def copied(writer: transfers.Writer, keys: list[ChunkKey]) -> object:
        return written(writer, [*one.keys(first), *keys])

    monkeypatch.setattr(transfers.Writer, "_copied", copied)
    through(one, cache, second)
    assert (two.lookup(first), two.lookup(second)) == (0, CHUNK)
    assert one.get_stats()["offload"]["dropped_gone"] == 1


def test_a_bad_object_is_removed(nodes: list[Node], depot: Depot, model: str, raw: Raw) -> None:
    """What is bad: test_offload_objects."""
    one, two = (engine(at, depot, model) for at in nodes)
    cache, tokens = Cache(), prompt(LENGTH)
    through(one, cache, tokens)
    names = [objects.name(key) for key in two.keys(tokens)]
    raw.damage(names[2])
    assert raw.there(names) == [True] * 5
    assert two.lookup(tokens) == LENGTH
    assert get(two, cache, tokens) == 2 * CHUNK
    assert two.get_stats()["failures"]["offload_bad"] == 1
    eventually(lambda: raw.there(names) == [True, True, False, True, True])
    # What is computed instead is written.
    through(two, cache, tokens)
    assert raw.there(names) == [True] * 5


def test_a_store_that_is_slower_than_computing_is_tried_now_and_then(
    nodes: list[Node], depot: Depot, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier.OffloadTier._measured, "__defaults__", (1,))
    one, cache = engine(nodes[0], depot, model), Cache()
    two = engine(nodes[1], depot, model, min_bandwidth=ByteSize(1 << 40), retry_seconds=60.0)
    for tokens in (first := prompt(LENGTH), other := prompt(LENGTH, 2)):
        through(one, cache, tokens)
    assert get(two, cache, first) == LENGTH
    assert [two.lookup(other) for _ in range(3)] == [LENGTH, 0, 0]


def test_without_a_master_everything_else_works(
    nodes: list[Node], depot: Depot, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is dead: no exception, no wait, no look-up that costs anything."""
    settings = TIER | {"mooncake": {"master": "127.0.0.1:9", "rpc_seconds": 0.5}}
    monkeypatch.setattr(transfers.Writer.offer, "__defaults__", (3,))
    offload = depot.offload(**settings)
    config = msgspec.structs.replace(nodes[0].config("host", ROOMY), offload=offload)
    with VCacheEngine(config, layout_of(Cache(), model=model)) as alone:
        cache, tokens = Cache(), prompt(LENGTH)
        put(alone, cache, tokens)
        assert alone.lookup(tokens) == LENGTH
        assert get(alone, cache, tokens) == LENGTH
        assert alone.lookup(prompt(LENGTH, 2)) == 0
        assert alone.get_stats()["offload"]["usable"] is False
        assert alone.get_stats()["offload"]["dropped_backlog"] == 2


def test_vcache_clear_reaches_below_where_it_is_told_to(
    nodes: list[Node],
    hung_depot: Depot,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cache, tokens = Cache(), prompt(LENGTH)
    one, reader = engine(nodes[0], hung_depot, model), engine(nodes[1], hung_depot, model)
    through(one, cache, tokens)
    assert reader.contains(one.keys(tokens)[0]) == 1
    mooncake = f"{{master: '{hung_depot.master.address}'}}"
    Path("on.yaml").write_text(f"offload: {{policy: write_through, mooncake: {mooncake}}}\n")

    def clear(*arguments: str, expect: int = 0) -> str:
        said = vcache("clear", "--socket", str(nodes[0].path), *arguments, expect=expect)
        return str(said.stdout + said.stderr)

    assert "offload.policy is off; name the file" in clear("--offload", expect=1)
    assert int(clear().split(" chunks and blocks forgotten\n")[0]) >= 5
    assert "--offload removes them" in clear("--config", "on.yaml")
    assert reader.contains(one.keys(tokens)[0]) == 1
    said = "0 chunks and blocks forgotten\n5 objects removed from the offload tier\n"
    assert clear("--config", "on.yaml", "--offload") == said
    assert reader.lookup(tokens) == 0


def test_a_reset_covers_the_offload_tier(
    nodes: list[Node], hung_depot: Depot, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nobody on the node, though its put ends after the reset, and whatever the server forgets.
    A node that was not reset has it.
    """
    cache, tokens = Cache(), prompt(LENGTH)
    one, two = (engine(nodes[0], hung_depot, model) for _ in range(2))
    other = engine(nodes[1], hung_depot, model)
    keys = one.keys(tokens)
    assert one._session.tier is not None
    begun, store = threading.Event(), one._session.tier._store
    puts = store.put
    monkeypatch.setattr(store, "put", lambda *given: begun.set() or puts(*given))
    hung_depot.providers[0].stop()
    put(one, cache, tokens)
    assert begun.wait(SECONDS)
    with nodes[0].client() as client:
        assert client.clear(keys[0][:NAMESPACE_BYTES], reset=True) == 5
    hung_depot.providers[0].cont()
    assert one.flush(SECONDS, through=True)
    # A slow machine reads some of it only, by the deadline, and the rest the next time.
    eventually(lambda: get(other, cache, tokens) == LENGTH)

    def nothing() -> bool:
        return not any(made.lookup(tokens) or get(made, cache, tokens) for made in (one, two))

    assert nothing()
    for forgetful in (False, True):
        with leaving_nothing(nodes[0].path) if forgetful else nullcontext():
            nodes[0].server.kill()
        nodes[0].serve()
        eventually(lambda: all(made.get_stats()["connected"] for made in (one, two)))
        assert nothing()
    # It goes on, once the server gives out room again.
    eventually(lambda: through(one, cache, tokens) or one.lookup(tokens) == LENGTH)  # type: ignore[func-returns-value]
    with nodes[0].client() as client:
        client.clear()
    eventually(lambda: two.lookup(tokens) == LENGTH)
    assert get(two, cache, tokens) == LENGTH


# ---- on the host and on a GPU

DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arrangement", [FLASH, MLA], ids=lambda value: value.name)
def test_what_one_node_stored_another_reads_and_keeps(
    nodes: list[Node], depot: Depot, model: str, device: str, arrangement: Arrangement
) -> None:
    cache, tokens = cache_on(device, arrangement), prompt(LENGTH + 7)
    one, two = (engine(at, depot, model, cache=cache, device=device) for at in nodes)
    through(one, cache, tokens)
    (key, *_) = two.keys(tokens)
    assert (one.contains(key), two.contains(key), two.contains(ChunkKey(bytes(26)))) == (0, 1, -1)
    assert two.lookup(tokens) == LENGTH
    assert get(two, cache, tokens) == LENGTH
    stats = two.get_stats()
    assert (stats["hits"]["offload"], stats["bytes"]["offload"]) == (5, 5 * cache.chunk_bytes)
    # Promoted, and not written below again.
    assert two.flush(SECONDS, through=True)
    assert two.contains(key) == 0
    assert get(two, cache, tokens, seed=2) == LENGTH
    stats = two.get_stats()
    assert (stats["hits"]["vram"], stats["offload"].get("written", 0)) == (5, 0)
