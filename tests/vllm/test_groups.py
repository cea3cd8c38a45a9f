"""Models whose layers have several block tables, or give blocks back while their request runs: what
a chunk has of them against vLLM's own KV cache manager, and real vLLM on the CPU, where a hit fills
exactly what it needs, and is the same to the bit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import PATIENT, eventually
from vllm_cases import BLOCK, CHUNK, Node, Prompt, here, needs_vllm, new_tokens
from vllm_models import write_model, write_states
from vllm_objects import comes_back

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import torch
from soak import scheduling
from soak.scheduling import full, window
from table_cases import planned, sparse
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from vcache_backend.errors import LayoutError
from vcache_backend.integration.vllm.model import groups
from vcache_backend.protocol.client import Client
from vcache_backend.transfer.keys import state_keys

__all__ = ["here"]

HIT = 15 * CHUNK
CASES = 400


def spec(tokens: int = 0, block: int = 16) -> Any:
    size = {"head_size": 8 * 16 // block}
    return window(tokens, block, **size) if tokens else full(block, **size)


state = functools.partial(scheduling.state, shapes=((1, 2),))


def caches(*specs: Any) -> kinds.KVCacheConfig:
    return scheduling.Tables(specs, None).config(400)


# ---- lists, against vLLM's own manager


class Case:
    """A request of random length, whose windows, chunks and blocks are random, in vLLM's own
    manager.
    """

    def __init__(self, choice: random.Random) -> None:
        self.choice, self.size = choice, choice.choice([32, 64, 128])
        sizes = choice.choice([(16, 16, 16), (16, 32, 16), (4, 32, 8)])
        specs = [spec(choice.randrange(2, 300), sizes[0]), spec(0, sizes[1])]
        if choice.random() < 0.3:
            specs = specs[:1]
        choice.shuffle(specs)
        self.config = caches(*specs)
        block = math.lcm(*(one.block_size for one in specs))
        more = {"max_model_len": 2048, "max_in_flight_tokens": 2048, "enable_caching": True}
        more |= {"scheduler_block_size": block, "hash_block_size": min(sizes)}
        self.manager = KVCacheManager(self.config, **more)
        self.groups = groups.read(self.config, self.size)
        self.length = choice.randrange(self.size, 1200)
        hasher = kv_cache_utils.get_request_block_hasher(min(sizes), sha256_cbor)
        tokens = [choice.randrange(1000) for _ in range(self.length)]
        params = SamplingParams(max_tokens=1)
        self.request = Request("one", tokens, params, None, block_hasher=hasher)
        self.rows: list[list[int]] = []

    def loads(self, end: int) -> bool:
        """A hit of `end` tokens: wanted is what vLLM has reserved for it, once each; whether
        windows leave anything out.
        """
        added = self.manager.empty_kv_cache_blocks
        more = {"delay_cache_blocks": True, "num_new_computed_tokens": 0}
        more |= {"new_computed_blocks": added}
        self.manager.allocate_slots(self.request, 0, num_external_computed_tokens=end, **more)
        self.rows = [list(row) for row in self.manager.get_block_ids("one")]
        sizes = [group.kv_cache_spec.block_size for group in self.config.kv_cache_groups]
        rows = [row[: end // size] for row, size in zip(self.rows, sizes, strict=True)]
        real = [block for row in rows for block in row if block]
        wanted = self.groups.wanted(self.rows, 0, end)
        assert sorted(block for block in wanted if block >= 0) == sorted(real)
        assert len(wanted) == end // self.size * self.groups.blocks
        self.request.num_computed_tokens = end
        self.manager.cache_blocks(self.request, end)
        return len(real) < sum(end // size for size in sizes)

    def steps(self) -> tuple[int, int]:
        """Compute the rest: after each step, what is taken for there is there, and what the step
        completed is taken for there. How many chunks were looked at, and how many were gone."""
        looked = gone = 0
        while self.request.num_computed_tokens < self.length:
            before = self.request.num_computed_tokens
            step = min(self.choice.choice([1, 7, 16, 50, 200]), self.length - before)
            added = self.manager.allocate_slots(self.request, step).get_block_ids()
            had = self.rows or [[] for _ in added]
            self.rows = [a + list(b) for a, b in zip(had, added, strict=True)]
            true = [list(row) for row in self.manager.get_block_ids("one")]
            self.request.num_computed_tokens += step
            stop = self.request.num_computed_tokens // self.size
            first = self.groups.alive_from(self.rows, before, 0, stop)
            assert first <= before // self.size
            taken, due = (self.groups.chunks(rows, first, stop) for rows in (self.rows, true))
            assert taken == due
            assert groups.NULL not in taken
            looked, gone = looked + stop, gone + first
        return looked, gone


def test_what_is_stored_and_loaded_is_what_vllm_keeps_and_wants() -> None:
    kv_cache_utils.init_none_hash(sha256_cbor)
    choice, hits, partial, looked, gone = random.Random(5), 0, 0, 0, 0
    for _ in range(CASES):
        case = Case(choice)
        chunks = choice.randrange(0, (case.length - 1) // case.size + 1)
        end = chunks * case.size if choice.random() < 0.5 else 0
        if end:
            hits, partial = hits + 1, partial + case.loads(end)
        seen = case.steps()
        looked, gone = looked + seen[0], gone + seen[1]
    assert min(hits, partial, gone) > CASES // 8
    assert looked > gone


def test_blocks_that_vllm_has_are_not_wanted_and_missing_ones_do_not_count_as_loaded() -> None:
    found = groups.read(caches(spec(33), spec()), 64)
    assert (found.text, found.blocks) == ("full/16 window33/16", 6)
    rows = [[0, 0, 0, 0, 0, 0, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]]
    assert found.wanted(rows, 0, 128) == [11, 12, 13, 14, -1, -1, 15, 16, 17, 18, 7, 8]
    assert found.wanted(rows, 32, 128) == [-1, -1, 13, 14, -1, -1, 15, 16, 17, 18, 7, 8]
    assert found.wanted(rows, 112, 128) == [-1, -1, -1, 18, -1, 8]
    with pytest.raises(ValueError, match="wants 1 blocks that chunks of 64 do not have"):
        found.wanted([[0, 0, 0, 0, 0, 6, 7, 8], rows[1]], 0, 128)
    with pytest.raises(ValueError, match="wants 96 tokens"):
        found.wanted(rows, 0, 96)
    # What vLLM does not show is not there, whatever its window.
    windows = [[*range(1, 7), block, 8] for block in (7, 0)]
    assert [found.alive_from([window, rows[1]], 0, 0, 2) for window in windows] == [0, 2]


def test_a_state_is_as_many_chunks_as_its_blocks_take_and_is_wanted_where_the_hit_ends() -> None:
    found = groups.read(caches(state(), spec(), state(), state()), 32)
    assert (found.blocks, found.parts, found.text.split()[0]) == (2, 2, "full/16")
    rows = [[0, 0, 0, 5], [11, 12, 13, 14], [0, 0, 0, 6], [0, 0, 0, 7]]
    assert found.wanted(rows, 0, 64) == [11, 12, 13, 14, 5, 6, 7, -1]
    assert found.wanted(rows, 32, 64) == [13, 14, 5, 6, 7, -1]
    for wrong in ([0, 0, 4, 5], [0, 0, 0, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="other states than the one at token 64"):
            found.wanted([wrong, *rows[1:]], 0, 64)
    assert found.ended(rows, 64, []) == {64: [5, 6, 7]}
    offered = [(0, 3, 32), (2, 4, 32), (3, 8, 32), (0, 9, 48)]
    assert found.ended(rows, 65, offered) == {32: [3, 4, 8]}
    assert found.ended(rows, 65, [(0, 3, 32), (2, 4, 32)]) == {}
    other = groups.read(caches(spec(), state(dtypes=(torch.bfloat16,))), 32).text
    assert other != groups.read(caches(spec(), state()), 32).text


# ---- what is refused


def other(kind: str, **more: Any) -> Any:
    """A spec of another kind of vLLM's."""
    assert hasattr(kinds, kind)
    return type(kind, (), {"block_size": 16, "prefix_cacheable": True} | more)()


LOCAL = other("ChunkedLocalAttentionSpec")
UNCACHED = other("FullAttentionSpec", prefix_cacheable=False)


@pytest.mark.parametrize("flag", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_groups_that_are_not_vllms_prefix_cache_are_refused(flag: dict[str, bool]) -> None:
    config = caches(spec(33), spec())
    config.kv_cache_groups[0].__dict__.update(flag)
    with pytest.raises(LayoutError, match="not part of vLLM's own prefix cache"):
        groups.read(config, 64)


def test_a_window_has_the_tokens_that_vllm_retains() -> None:
    kept = other("SlidingWindowSpec", sliding_window=33, extra_retained_tokens=16)
    assert groups.read(caches(kept), 64).text == "window49/16"


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([LOCAL], "set VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=0"),
        ([spec(), other("RSWASpec")], "a reference window gives an answer's blocks back"),
        ([other("SinkFullAttentionSpec")], "also hold the model's sinks"),
        ([other("HiddenStateCacheSpec")], "the KV cache is HiddenStateCacheSpec"),
        ([replace(spec(), non_causal=True)], "depends on the whole prompt"),
        ([state(mamba_cache_mode="none"), spec()], "without --no-enable-prefix-caching"),
        ([state(num_speculative_blocks=2), spec()], "without --speculative-config"),
        ([state()], "no layer keeps KV of tokens"),
        ([UNCACHED], "not part of vLLM's own prefix cache"),
        (
            [spec(33), spec(0, 48)],
            "64 is not a multiple of 48 tokens: set engine.chunk_size .* to 96",
        ),
    ],
)
def test_tables_that_cannot_be_shared_are_refused_in_one_line(specs: list[Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said) as raised:
        groups.read(caches(*specs), 64)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_latents_and_indexers_keys_are_one_table_that_comes_back(layout: str) -> None:
    """vLLM shows the scheduler the first layer alone."""
    there = planned(sparse(), layout)
    here = kv_cache_utils.generate_scheduler_kv_cache_config([there])
    assert [groups.several(config) for config in (there, here)] == [False, False]
    found = groups.read(there, 128)
    assert found.plain
    assert found.groups == groups.read(here, 128).groups
    tensors = allocate_kv_cache(there, torch.device("cpu"), KVCacheLayout[layout])
    kv = found.describe(tensors, 10)
    nbytes = 2 * 64 * 3 * (656 + 132)
    assert (kv.chunk_bytes(128), len(kv.kinds)) == (nbytes, 2)
    assert comes_back(kv, 128)


def test_of_a_table_of_several_layers_each_is_looked_at() -> None:
    sizes = {"layer 0": spec(), "layer 1": wide(kinds.FullAttentionSpec)}
    there = planned(sizes, "LBNHC")
    mixed = there.kv_cache_groups[0].kv_cache_spec
    assert groups.read(there, 64).plain
    mixed.kv_cache_specs["layer 1"] = other("RSWASpec")
    with pytest.raises(LayoutError, match="a reference window"):
        groups.read(there, 64)
    windows = {"layer 0": spec(33), "layer 1": wide(kinds.SlidingWindowSpec, sliding_window=33)}
    there = planned(windows, "LBNHC")
    assert groups.several(there)
    assert groups.read(there, 64).text == "window33/16"


def wide(kind: Any, **more: int) -> Any:
    return kind(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, **more)


@pytest.mark.parametrize("layer", ["layer 0", "layer 1"])
def test_a_pipeline_stage_without_layers_of_a_kind_has_blocks_split_as_all_are(layer: str) -> None:
    """Its kernel wants blocks of 8 tokens. Otherwise chunks would be read from other blocks."""
    found, there = groups.read(caches(spec(33), spec()), 64), torch.zeros(2 * 10, 1, 8, 16)
    kv = found.describe({layer: there}, 10)
    assert (kv.block_size, [share.block_size for share in kv.shares]) == (8, [8, 8])
    assert kv.blocks_in(64) == 2 * found.blocks
    with pytest.raises(LayoutError, match="20 blocks of 16 tokens where vLLM hands out 7 of 16"):
        found.describe({layer: torch.zeros(20, 1, 16, 16)}, 7)


def test_states_that_lie_elsewhere_than_tokens_are_refused() -> None:
    found, room = groups.read(caches(state(), spec()), 64), torch.zeros(10, 1, 16, 16)
    flat = room.view(10, -1)
    wrong = flat[:, 8:40], flat[:9], torch.zeros(10, 256)
    for there, fits in ((flat[:, :40], True), *((one, False) for one in wrong)):
        held = {"layer 0": there, "layer 1": room}
        if fits:
            assert found.describe(held, 10).layers == 1
        else:
            said = "the state of layer 0 does not lie in pages of 1024 B"
            with pytest.raises(LayoutError, match=said):
                found.describe(held, 10)


# ---- real vLLM


class Pair:
    """Two instances of one model."""

    def __init__(self, here: Node, layers: str, window: int, share: str) -> None:
        folder, states = here.folder / f"{layers}{window}", layers == STATES
        settings = {"connector": {"share": share}}
        if not folder.exists():
            _ = write_states(folder) if states else write_model(folder, layers, window)
        self.model = model = str(folder)
        # Hits end with vLLM's blocks, and states are where steps end.
        few = {"block_size": CHUNK, "max_num_batched_tokens": 8 * CHUNK} if states else {}
        name = f"{layers}{window}-{share}"
        # What vLLM's own cache keeps of each step, to compare with.
        kept = {"prefix_cache_retention_interval": CHUNK} if states else {}
        self.a = here.connect(f"{name}-a", settings, model=model, **few, **kept)
        # Its steps are others, of which no answer may depend.
        steps = few | {"max_num_batched_tokens": 3 * CHUNK} if states else {}
        self.b = here.connect(f"{name}-b", settings, model=model, **steps)
        full = layers.count("f")
        self.tables = len(layers) // (min(full, len(layers) - full) or len(layers))
        self.full, self.window = self.tables * full // len(layers), window
        self.block, self.states = CHUNK if states else BLOCK, 2 if states else 0

    def needed(self) -> int:
        """Blocks that a hit of `HIT` tokens fills: of full attention all, of the others those of
        their windows.
        """
        window = 1 if self.states else HIT // BLOCK - (HIT - self.window + 1) // BLOCK
        return self.full * (HIT // self.block) + (self.tables - self.full) * window

    def keep(self, here: Node, tokens: list[int]) -> vllm_cases.Answer:
        """Have `a` compute a prompt of `HIT` tokens or some more. Its answer, once others find the
        prompt, with the states that its two steps have left.
        """
        before, answer = here.chunks(), self.a.one(tokens)
        here.kept(self.a, before + HIT // CHUNK + self.states)
        return answer


Pairs = Callable[..., Pair]


@pytest.fixture(scope="module")
def pairs(here: Node) -> Pairs:
    return functools.cache(lambda *given: Pair(here, *given))


STATES = "cfcf"
"""Layers of the model with states."""


WHOLE = [("sfsf", 64, "pool"), ("ssss", 100, "pool"), (STATES, 0, "pool")]
WHOLE += [("sfsf", 64, "in_place"), (STATES, 0, "in_place")]


@needs_vllm
@pytest.mark.parametrize(("layers", "window", "share"), WHOLE)
def test_a_hit_is_equal_to_vllms_own_and_fills_what_it_needs_and_nothing_else(
    here: Node, pairs: Pairs, layers: str, window: int, share: str
) -> None:
    """In place a hit ends where the owner's own cache still has a window."""
    pair = pairs(layers, window, share)
    tokens = new_tokens(1000 if share == "pool" else HIT + 5)
    cold = pair.keep(here, tokens)
    own = pair.a.one(tokens[: HIT + 5])
    assert (cold.cached, own.cached) == (0, HIT)
    for reader in (pair.b, pair.a):
        reader.forget()
        reader.ask("poison")
        hit = reader.one(tokens[: HIT + 5])
        assert (hit.cached, hit.said) == (HIT, own.said), reader.name
        # And one a table for the tokens that are computed.
        assert reader.ask("written") == pair.needed() + pair.tables, reader.name
        again = reader.again(tokens)
        assert again.cached == HIT
        assert again.agrees(cold)
        assert reader.ask("told")
    assert "vcache failed" not in pair.a.log + pair.b.log


@needs_vllm
def test_a_hit_ends_where_a_state_is(here: Node, pairs: Pairs) -> None:
    pair, tokens = pairs(STATES, 0, "pool"), new_tokens(HIT + 5)
    cold = pair.keep(here, tokens)
    # No longer, or vLLM's own step would end where it has seen two prompts part.
    other = tokens[: 10 * CHUNK + 5] + new_tokens(280)
    found, own = pair.b.again(other, params={"vcache": {"store": False}}), pair.a.one(other)
    both = found.cached, own.cached
    assert both == (8 * CHUNK, 8 * CHUNK), "where the first of the two steps ended"
    # b computes the rest in steps of other lengths, which round differently on a CPU without AMX.
    same_bits = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    assert found.said == own.said if same_bits else found.agrees(own)
    assert cold.differs(own)


@needs_vllm
def test_a_state_that_goes_before_its_load_is_computed(here: Node, pairs: Pairs) -> None:
    pair, tokens = pairs(STATES, 0, "pool"), new_tokens(HIT + 5)
    known, cold = set(here.chunk_keys()), pair.keep(here, tokens)
    stored = eventually(
        lambda: len(new := set(here.chunk_keys()) - known) == HIT // CHUNK + pair.states and new
    )

    def evict() -> None:
        with Client(here.socket, PATIENT, reconnect=False) as client:
            states = [key for key in state_keys(list(stored), 1) if key in stored]
            assert client.remove(states) == pair.states

    with vllm_cases.stopped_at(pair.a, vllm_cases.PIN) as place:
        pair.a.forget()
        (failed,) = place.while_there(evict, Prompt(tokens))
    assert failed.cached == 0
    assert failed.agrees(cold)
