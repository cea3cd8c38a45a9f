"""Models whose layers have several block tables, or give blocks back while their request runs: what a chunk has of them against vLLM's own
KV cache manager, and real vLLM on the CPU, where a hit fills exactly what it needs, and is the same to the bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import eventually
from vllm_cases import BLOCK, CHUNK, SCATTER, VIEWS, Node, Prompt, meddled, missing, new_tokens, node
from vllm_models import write_model
from vllm_objects import vllm_config

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from vcache_backend.config import EngineConfig
from vcache_backend.doctor import model
from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.integration.vllm import compat, groups, model_spec

HERE = pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here")
HIT = 15 * CHUNK
CASES = 1200
pytestmark = pytest.mark.timeout(300)


def spec(window: int = 0, block_size: int = 16) -> Any:
    sizes = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8 * 16 // block_size, "dtype": torch.float32}
    return SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)


def caches(*specs: Any) -> KVCacheConfig:
    named = [KVCacheGroupSpec([f"layer {number}"], one) for number, one in enumerate(specs)]
    return KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=named)


# ---- lists, against vLLM's own manager


class Case:
    """A request of random length, whose windows, chunks and blocks are random, in vLLM's own manager."""

    def __init__(self, choice: random.Random) -> None:
        self.choice, self.size = choice, choice.choice([32, 64, 128])
        sizes = choice.choice([(16, 16, 16), (16, 32, 16)])
        specs = [spec(choice.randrange(2, 300), sizes[0]), spec(0, sizes[1])]
        if choice.random() < 0.3:
            specs = specs[:1]
        choice.shuffle(specs)
        self.config = caches(*specs)
        block = math.lcm(*(one.block_size for one in specs))
        lengths = {"max_model_len": 2048, "max_in_flight_tokens": 2048}
        self.manager = KVCacheManager(self.config, **lengths, enable_caching=True, scheduler_block_size=block, hash_block_size=16)
        self.groups = groups.read(self.config, self.size)
        self.length = choice.randrange(self.size, 1200)
        hasher = get_request_block_hasher(16, sha256_cbor)
        tokens = [choice.randrange(1000) for _ in range(self.length)]
        self.request = Request("one", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self.rows: list[list[int]] = []

    def loads(self, end: int) -> bool:
        """A hit of `end` tokens: wanted is what vLLM has reserved for it, once each; whether windows leave anything out."""
        added = self.manager.empty_kv_cache_blocks
        more = {"delay_cache_blocks": True, "new_computed_blocks": added, "num_new_computed_tokens": 0}
        self.manager.allocate_slots(self.request, 0, num_external_computed_tokens=end, **more)
        self.rows = [list(row) for row in self.manager.get_block_ids("one")]
        sizes = [group.kv_cache_spec.block_size for group in self.config.kv_cache_groups]
        real = [block for row, size in zip(self.rows, sizes, strict=True) for block in row[: end // size] if block]
        wanted = self.groups.wanted(self.rows, 0, end)
        assert sorted(block for block in wanted if block >= 0) == sorted(real)
        assert len(wanted) == end // self.size * self.groups.blocks
        self.request.num_computed_tokens = end
        self.manager.cache_blocks(self.request, end)
        return len(real) < sum(end // size for size in sizes)

    def steps(self) -> tuple[int, int]:
        """Compute the rest: after each step, what is taken for there is there, and what the step completed is taken for there. How many
        chunks were looked at, and how many were gone."""
        looked = gone = 0
        while self.request.num_computed_tokens < self.length:
            before = self.request.num_computed_tokens
            step = min(self.choice.choice([1, 7, 16, 50, 200]), self.length - before)
            added = self.manager.allocate_slots(self.request, step).get_block_ids()
            self.rows = (
                [list(row) for row in added] if not self.rows else [a + list(b) for a, b in zip(self.rows, added, strict=True)]
            )
            true = [list(row) for row in self.manager.get_block_ids("one")]
            self.request.num_computed_tokens += step
            stop = self.request.num_computed_tokens // self.size
            first = self.groups.alive_from(self.rows, before, 0, stop)
            assert first <= before // self.size
            taken = self.groups.chunks(self.rows, first, stop)
            assert taken == self.groups.chunks(true, first, stop)
            assert groups.NULL not in taken
            looked, gone = looked + stop, gone + first
        return looked, gone


def test_what_is_stored_and_loaded_is_what_vllm_keeps_and_wants() -> None:
    init_none_hash(sha256_cbor)
    choice, hits, partial, looked, gone = random.Random(5), 0, 0, 0, 0
    for _ in range(CASES):
        case = Case(choice)
        end = choice.randrange(0, (case.length - 1) // case.size + 1) * case.size if choice.random() < 0.5 else 0
        if end:
            hits, partial = hits + 1, partial + case.loads(end)
        seen = case.steps()
        looked, gone = looked + seen[0], gone + seen[1]
    assert min(hits, partial, gone) > CASES // 8
    assert looked > gone


def test_of_what_vllm_has_itself_nothing_is_wanted_and_what_chunks_lack_is_not_taken_for_loaded() -> None:
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
    assert [found.alive_from([[*range(1, 7), block, 8], rows[1]], 0, 0, 2) for block in (7, 0)] == [0, 2]


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("MambaSpec", "keep a state"),
        ("ChunkedLocalAttentionSpec", "unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"),
        ("UniformTypeKVCacheSpecs", "pages of several sizes"),
        ("CrossAttentionSpec", "an encoder's output"),
        ("SlidingWindowMLASpec", "the KV cache is SlidingWindowMLASpec"),
        ("RSWASpec", "the KV cache is RSWASpec"),
        ("SinkFullAttentionSpec", "the KV cache is SinkFullAttentionSpec"),
        ("HiddenStateCacheSpec", "the KV cache is HiddenStateCacheSpec"),
    ],
)
def test_layers_that_are_not_known_are_refused_in_one_line(kind: str, change: str) -> None:
    of_kind = type(kind, (), {"block_size": 16})()
    assert hasattr(kinds, kind)
    for specs in ((of_kind,), (spec(), of_kind)):
        with pytest.raises(LayoutError, match=change) as raised:
            groups.read(caches(*specs), 64)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("layer", ["layer 0", "layer 1"])
def test_a_pipeline_stage_without_layers_of_a_kind_has_blocks_split_as_all_are(layer: str) -> None:
    """Its kernel wants blocks of 8 tokens. Otherwise chunks would be read from other blocks."""
    found, there = groups.read(caches(spec(33), spec()), 64), torch.zeros(2 * 10, 2, 8, 1, 8)
    kv = model_spec.describe_groups(found, {layer: there}, 10, 64, EngineConfig())
    assert (kv.block_size, [share.block_size for share in kv.shares]) == (8, [8, 8])
    assert kv.blocks_in(64) == 2 * found.blocks
    with pytest.raises(LayoutError, match="20 blocks of 16 tokens where vLLM hands out 7 of 16"):
        model_spec.describe_groups(found, {layer: torch.zeros(20, 2, 16, 1, 8)}, 7, 64, EngineConfig())


def test_a_model_that_keeps_nothing_is_refused_and_served() -> None:
    assert not groups.several(caches())
    with pytest.raises(LayoutError, match="keeps nothing of its tokens"):
        groups.read(caches(), 64)


def test_groups_that_are_not_vllms_prefix_cache_and_drafts_beside_others_are_refused() -> None:
    config = caches(spec(33), spec())
    config.kv_cache_groups[1].is_eagle_group = True
    with pytest.raises(LayoutError, match="start vLLM without --speculative-config"):
        groups.read(config, 64)
    alone = caches(spec())
    alone.kv_cache_groups[0].is_eagle_group = True
    assert not groups.several(alone)
    assert groups.read(alone, 64).text == "full/16"
    for flag, value in (("host_resident", True), ("enable_kv_transfer", False)):
        config = caches(spec(33), spec())
        setattr(config.kv_cache_groups[0], flag, value)
        with pytest.raises(LayoutError, match="no part of vLLM's own prefix cache"):
            groups.read(config, 64)
    with pytest.raises(LayoutError, match="no part of vLLM's own prefix cache"):
        groups.read(caches(type("FullAttentionSpec", (), {"block_size": 16, "prefix_cacheable": False})()), 64)
    kept = type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 33, "extra_retained_tokens": 16})()
    assert groups.read(caches(kept), 64).text == "window49/16"


def test_one_table_of_all_tokens_adds_nothing_to_the_namespace_and_others_say_what_they_are(tmp_path: Path) -> None:
    """Which would keep instances from chunks that they had stored before."""
    (tmp_path / "model").mkdir()
    config = vllm_config(model_config__model=str(tmp_path / "model"), use_v2_model_runner=False)
    alone = compat.read_model(config, caches(spec()), "")
    assert alone == model_spec.read_model(config)
    several = compat.read_model(config, caches(spec(33), spec()), "")
    assert (several.extra, several.recomputes) == (alone.extra | {"groups": "full/16 window33/16"}, False)
    assert compat.read_model(config, caches(spec(33)), "").extra["groups"] == "window33/16"


def test_a_chunk_that_is_not_made_of_whole_blocks_of_every_group_is_refused_with_one_that_is() -> None:
    with pytest.raises(LayoutError, match=r"chunk_size 80 is no multiple of 32 tokens: set engine\.chunk_size: 96"):
        groups.read(caches(spec(33), spec(0, 32)), 80)


def test_states_beside_any_connector_end_vllm_0_26_which_would_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MambaSpec(block_size=16, shapes=((1, 2),), dtypes=(torch.float32,))
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    compat.check_states(config, caches(state, spec()))
    monkeypatch.setattr(vllm, "__version__", "0.26.0+cpu")
    for wrong in (caches(state, spec()), caches(state, state)):
        with pytest.raises(ConfigError, match="--no-enable-prefix-caching, or take vLLM 0.27"):
            compat.check_states(config, wrong)
    for fine in (caches(spec(33), spec()), caches(state)):
        compat.check_states(config, fine)
    config.cache_config.enable_prefix_caching = False
    compat.check_states(config, caches(state, spec()))
    monkeypatch.setattr(vllm, "__version__", "0.27.1")
    config.cache_config.enable_prefix_caching = True
    compat.check_states(config, caches(state, spec()))


# ---- real vLLM


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("groups")) as made:
        yield made


class Pair:
    """Two instances of one model: `a` loads in the step where it can, `b` between steps."""

    def __init__(self, here: Node, layers: str, window: int) -> None:
        self.model = model = str(write_model(here.folder / f"{layers}{window}", layers, window))
        self.a = here.connect(f"{layers}-a", model=model)
        self.b = here.connect(f"{layers}-b", {"connector": {"sync_below_tokens": 0}}, model=model)
        full = layers.count("f")
        self.tables = len(layers) // (min(full, len(layers) - full) or len(layers))
        self.full, self.window = self.tables * full // len(layers), window

    def needed(self) -> int:
        """Blocks that a hit of `HIT` tokens fills: of full attention all, of the others those of their windows."""
        window = HIT // BLOCK - (HIT - self.window + 1) // BLOCK
        return self.full * (HIT // BLOCK) + (self.tables - self.full) * window


@pytest.fixture(scope="module")
def pairs(here: Node) -> Callable[[str, int], Pair]:
    made: dict[str, Pair] = {}
    return lambda layers, window: made.setdefault(layers, Pair(here, layers, window)) if layers not in made else made[layers]


@HERE
@pytest.mark.parametrize(("layers", "window"), [("sfsf", 64), ("sssf", BLOCK + 1), ("ssss", 100)])
def test_a_hit_is_equal_to_vllms_own_and_fills_what_it_needs_and_nothing_else(
    here: Node, pairs: Callable[[str, int], Pair], layers: str, window: int
) -> None:
    pair, tokens = pairs(layers, window), new_tokens(1000)
    before, cold = here.stats().chunks, pair.a.one(tokens)
    here.stored(before + HIT // CHUNK)
    own = pair.a.one(tokens[: HIT + 5])
    assert (cold.cached, own.cached) == (0, HIT)
    doctor = model.chunk_bytes(model.read(here.folder / f"{layers}{window}"), CHUNK)
    assert f" {doctor:,} B a chunk" in pair.a.log
    for reader in (pair.a, pair.b):
        reader.forget()
        reader.ask("poison")
        hit = reader.one(tokens[: HIT + 5])
        assert (hit.cached, hit.said) == (HIT, own.said), reader.name
        # And one a table for the tokens that are computed.
        assert reader.ask("written") == pair.needed() + pair.tables, reader.name
        again = reader.again(tokens)
        assert again.cached == HIT
        assert again.agrees(cold)
    assert "which counts as a miss" not in pair.a.log + pair.b.log


@HERE
def test_bytes_just_inside_of_a_window_matter_and_those_just_outside_are_not_read(
    here: Node, pairs: Callable[[str, int], Pair]
) -> None:
    a, tokens = pairs("sfsf", 64).a, new_tokens(HIT + 5)
    before, _ = here.stats().chunks, a.one(tokens)
    here.stored(before + HIT // CHUNK)
    own = a.again(tokens)
    assert own.cached == HIT
    last, windowed = HIT // CHUNK - 1, 1
    # Twice is as if never.
    for chunk, equal in ((last, False), (last, True), (last - 1, True)):
        with meddled(a, VIEWS, "negate", (chunk, windowed), times=1):
            answer = a.again(tokens)
        assert (answer.cached, answer.said == own.said) == (HIT, equal), chunk
    with meddled(a, VIEWS, "negate", (0, 0), times=1):
        answer = a.again(tokens)
    assert (answer.cached, answer.said == own.said) == (HIT, False)


@HERE
def test_a_request_whose_load_fails_is_computed_from_its_start(here: Node, pairs: Callable[[str, int], Pair]) -> None:
    pair, tokens = pairs("sfsf", 64), new_tokens(HIT + 5)
    before, cold = here.stats().chunks, pair.a.one(tokens)
    here.stored(before + HIT // CHUNK)
    with meddled(pair.b, SCATTER, "raise", times=1):
        failed = pair.b.again(tokens)
    assert failed.cached == 0
    assert failed.agrees(cold)
    assert pair.b.again(tokens).cached == HIT


@HERE
def test_chunks_that_are_announced_are_waited_for_and_what_is_for_one_reader_goes_with_it(
    here: Node, pairs: Callable[[str, int], Pair]
) -> None:
    pair, tokens, before = pairs("sfsf", 64), new_tokens(HIT + 5), here.stats().chunks
    asked = {"vcache": {"announced": True, "wait_seconds": 60, "consume_once": True, "store": False}}
    pair.b.tell("run", [Prompt(tokens, params=asked)], False)
    cold = pair.a.one(tokens)
    (answer,) = pair.b.answer()
    assert (cold.cached, answer.cached) == (0, HIT)
    assert answer.agrees(cold)
    eventually(lambda: here.stats().chunks == before)
    assert pair.b.again(tokens).cached == 0


@HERE
def test_chunks_that_do_not_fit_their_checksums_are_computed_with_all_before_them(
    here: Node, pairs: Callable[[str, int], Pair]
) -> None:
    model = pairs("sfsf", 64).model
    sums, tokens = here.connect("sums", {"engine": {"checksum": True}}, model=model), new_tokens(HIT + 5)
    before, cold = here.stats().chunks, sums.one(tokens)
    here.stored(before + HIT // CHUNK)
    own = sums.one(tokens)
    hit = sums.again(tokens)
    with here.corrupted():
        wrong = sums.again(tokens)
    # What it stored meanwhile is wrong by now.
    here.empty()
    assert (cold.cached, own.cached, hit.cached, wrong.cached) == (0, HIT, HIT, 0)
    assert hit.said == own.said
    assert wrong.agrees(cold)
