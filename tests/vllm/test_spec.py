"""What vLLM's configuration and tensors say of an instance, and the namespace."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm_cases import beside_vllm, needs_vllm
from vllm_objects import BLOCK, BLOCKS, LAYERS, LLAMA, HFConfig, attention, caches, vllm_config

from vcache_backend.errors import LayoutError
from vcache_backend.integration.vllm.model import spec as model_spec
from vcache_backend.integration.vllm.model.groups import Groups, LayerGroup
from vcache_backend.integration.vllm.model.spec import ModelSpec, ShardSpec, weights

CHUNK = 16
ROOT = bytes(range(32))


def table(kv_caches: Any, chunk_size: int = CHUNK, block_size: int = BLOCK) -> Groups:
    return Groups([LayerGroup(0, block_size, tuple(kv_caches))], chunk_size)


def shard(pp_rank: int = 0, tp_rank: int = 0, kv_caches: Any = None, **changes: Any) -> ShardSpec:
    config, tensors = vllm_config(**changes), kv_caches or caches()
    kv = table(tensors).describe(tensors, BLOCKS)
    return model_spec.read_shard(config, tensors, kv, CHUNK, pp_rank, tp_rank)


def namespace(
    model: ModelSpec, shards: Sequence[ShardSpec], chunk_size: int = CHUNK, root: bytes = ROOT
) -> str:
    return str(model_spec.layout(model, shards, chunk_size, root).namespace())


MODEL = model_spec.read_model(vllm_config())
SHARD = shard()


# ---- what is read


def test_blocks_that_the_kernel_cuts_are_described_as_the_tensors_have_them() -> None:
    cut = shard(kv_caches=caches(2 * BLOCKS, BLOCK // 2))
    assert (cut.block_size, cut.chunk_bytes) == (BLOCK // 2, SHARD.chunk_bytes)


def test_as_many_heads_as_tokens_are_told_apart() -> None:
    square = {name: torch.zeros((BLOCKS, BLOCK, BLOCK, 16)) for name in LAYERS}
    turned = {name: cache.transpose(1, 2) for name, cache in square.items()}
    names = [table(each).describe(each, BLOCKS).name for each in (square, turned)]
    assert names == ["head4.token4.dim16 float32", "token4.head4.dim16 float32"]


@pytest.mark.parametrize(
    ("kv_caches", "num_blocks", "chunk_size", "said"),
    [
        ({"layer": torch.zeros(BLOCKS, 2, 3, 16)}, BLOCKS, CHUNK, "a token axis of 4"),
        (caches(BLOCKS + 1), BLOCKS, CHUNK, "13 blocks of 4 tokens where vLLM hands out 12 of 4"),
        (caches(), BLOCKS, CHUNK + 2, "chunk_size 18 is not a multiple"),
    ],
)
def test_kv_caches_that_are_not_understood_are_an_error(
    kv_caches: Any, num_blocks: int, chunk_size: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        table(kv_caches, chunk_size).describe(kv_caches, num_blocks)


# ---- who shares


def another(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, dict):
        return value | {"weights": "dummy"}
    return not value if isinstance(value, bool) else value * 2 if value else type(value)(1)


@pytest.mark.parametrize("field", ModelSpec.__struct_fields__)
def test_a_field_that_changes_bytes_changes_the_namespace(field: str) -> None:
    changed = msgspec.structs.replace(MODEL, **{field: another(getattr(MODEL, field))})
    assert (namespace(changed, [SHARD]) == namespace(MODEL, [SHARD])) == (field == "named")


@pytest.mark.parametrize(
    "field", [name for name in ShardSpec.__struct_fields__ if name != "problem"]
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_field_of_any_shard_changes_the_namespace(field: str, which: int) -> None:
    shards = [shard(), shard(pp_rank=1)]
    changed = list(shards)
    value = another(getattr(shards[which], field))
    changed[which] = msgspec.structs.replace(shards[which], **{field: value})
    assert namespace(MODEL, changed) != namespace(MODEL, shards)


def test_another_partition_of_layers_is_another_namespace_and_the_order_of_shards_is_not() -> None:
    names = ["l0", "l1", "l2", "l3"]

    def stages(cut: int) -> list[ShardSpec]:
        parts = [names[:cut], names[cut:]]
        lie = [{name: torch.zeros((BLOCKS, 2, BLOCK, 16)) for name in part} for part in parts]
        return [shard(number, 0, tensors) for number, tensors in enumerate(lie)]

    assert namespace(MODEL, stages(1)) != namespace(MODEL, stages(2))
    assert namespace(MODEL, stages(1)[::-1]) == namespace(MODEL, stages(1))


def test_seed_and_chunk_size_are_part_of_it() -> None:
    backends = {name: attention("FLASHINFER") for name in LAYERS}
    other = shard(compilation_config__static_forward_context=backends)
    found = {namespace(MODEL, [SHARD], **more) for more in ({}, {"root": bytes(32)})}
    found |= {namespace(MODEL, [SHARD], chunk_size=2 * CHUNK), namespace(MODEL, [other])}
    assert len(found) == 4


@dataclass
class Quantization:
    linear: str = "fp8"
    ignore: set[int] = field(default_factory=lambda: set(range(9)))


def quantized(ignored: set[int]) -> ModelSpec:
    config = vllm_config(model_config__quantization_config=Quantization(ignore=ignored))
    return model_spec.read_model(config)


TUNED = {"tensorizer_uri": "s3://tuned"}
LOADER = {"load_format": "tensorizer", "model_loader_extra_config": TUNED}
IMAGES = {"mm_processor_cache_gb": 4, "mm_processor_kwargs": {"max_pixels": 784}}
WITHOUT_FIELDS = {
    "model_config__hf_config": HFConfig(hidden_size=512),
    "model_config__quantization": "fp8",
    "model_config__quantization_config": Quantization(),
    "model_config__dtype": torch.float16,
    "model_config__get_total_num_hidden_layers": lambda: 12,
    "load_config": SimpleNamespace(**LOADER),
    "model_config__multimodal_config": SimpleNamespace(**IMAGES),
    "speculative_config": SimpleNamespace(method="eagle", draft_model_config=None),
    "lora_config": SimpleNamespace(target_modules=["o_proj"]),
}


@pytest.mark.parametrize("path", WITHOUT_FIELDS)
def test_what_has_no_field_of_its_own_is_read_too(path: str) -> None:
    found = model_spec.read_model(vllm_config(**{path: WITHOUT_FIELDS[path]})).extra
    assert found not in (MODEL.extra, quantized(set()).extra)


def test_the_order_of_a_set_makes_no_difference() -> None:
    """It depends on Python's hash seed; of numbers that collide, on which came first."""
    sets = {0, 8}, {8, 0}
    assert list(sets[0]) != list(sets[1])
    one, other = (namespace(quantized(each), [SHARD]) for each in sets)
    assert one == other


@pytest.mark.parametrize(
    ("model", "longest", "scales"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, True, False),
        ({"rope_parameters": {"rope_type": "dynamic"}}, True, False),
        ({"model_type": "llama4"}, True, True),
        ({}, False, False),
    ],
)
def test_the_longest_request_matters_where_it_changes_the_others(
    model: dict[str, Any], longest: bool, scales: bool
) -> None:
    """On real vLLM a hit on an instance with another `max_model_len` was wrong tokens with
    LongRoPE. Generation settings may override how Llama 4 scales queries."""
    names = "model_config__hf_config", "model_config__hf_text_config"
    sections = {name: HFConfig(**model) for name in names}

    def of(most: int, **more: Any) -> str:
        config = vllm_config(**sections, model_config__max_model_len=most, **more)
        return namespace(model_spec.read_model(config), [SHARD])

    untuned = {"model_config__override_generation_config": {"attn_temperature_tuning": False}}
    assert (of(4096) != of(65_536), of(4096) != of(4096, **untuned)) == (longest, scales)


# ---- real vLLM, where it is installed


def real(served: object, folder: str, **changes: Any) -> tuple[ModelSpec, str]:
    """In a process with vLLM: what is read of its own configuration for the model in `folder`."""
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {"model": folder, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    given |= {"enforce_eager": True, "block_size": 32, "max_model_len": 512}
    given |= {"load_format": "dummy", "prefix_caching_hash_algo": "sha256_cbor"}
    config = EngineArgs(**given | changes).create_engine_config()
    model = model_spec.read_model(config)
    return model, next(model_spec.misfits(config, model), "")


def computed_otherwise(served: object, folder: str) -> list[tuple[ModelSpec, str]]:
    """In a process with vLLM: what is read of instances that compute other KV of one model, or have
    other weights of it."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import ModelRegistry

    changes: list[dict[str, Any]] = [
        {},
        {"load_format": "pt"},
        {"load_format": "ipc_cache"},
        {"quantization": "online", "quantization_config": {"moe": "fp8_per_channel"}},
        {"quantization": "online", "quantization_config": {"moe": "int8_per_channel_weight_only"}},
    ]
    found = [real(served, folder, **{"load_format": "auto"} | each) for each in changes]
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    found.append(real(served, folder, load_format="auto"))
    # vLLM's own layers and models are registered, too; these are not vLLM's.
    op_registry_oot["RMSNorm"] = SimpleNamespace
    found.append(real(served, folder, load_format="auto"))
    ModelRegistry.register_model("LlamaModel", "plugin.of.others:Llama")
    found.append(real(served, folder, load_format="auto"))
    override = {"LlamaForCausalLM": "vllm.model_executor.models.granite:GraniteForCausalLM"}
    return [*found, real(served, folder, load_format="auto", model_class_overrides=override)]


@needs_vllm
def test_what_real_vllm_computes_otherwise_has_a_namespace_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    with beside_vllm() as worker:
        found = worker.ask(computed_otherwise, str(tmp_path))
    assert len({namespace(model, [SHARD]) for model, _ in found}) == len(found)
    refused = [number for number, (_, refused) in enumerate(found) if refused]
    assert refused == [2]
    model = found[0][0]
    assert (model.kv_heads, model.head_dim, model.block_size) == (2, 64, 32)
    extra = model.extra["model_layers"], model.extra["model_dtype"], model.kv_cache_dtype
    assert extra == ("4", "bfloat16", "bfloat16")
    assert (model.device_type, model.hash_algorithm) == ("cpu", "sha256_cbor")
    assert (model.model, model.revision[:6]) == (str(tmp_path.resolve()), "files-")
    assert "10000" in model.rope
    assert re.fullmatch(r"vllm 0\.\d+\.\d+.*", model.extra["engine"])


def of_the_hub(served: object, folder: str) -> tuple[str, str]:
    """The name and revision of weights that vLLM knows by their repository, cached in `folder`."""
    from huggingface_hub import constants
    from vllm.config import ModelConfig

    constants.HF_HUB_CACHE = folder
    config: Any = ModelConfig(model="org/model", hf_config_path=folder, skip_tokenizer_init=True)
    return weights(config)


@needs_vllm
def test_weights_of_the_hub_are_known_by_their_commit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    commit = "0123456789abcdef0123456789abcdef01234567"
    refs = tmp_path / "models--org--model/refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(commit)
    with beside_vllm() as worker:
        assert worker.ask(of_the_hub, str(tmp_path)) == ("org/model", commit)
