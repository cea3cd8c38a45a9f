"""vLLM's configuration as far as vcache reads it, a worker's KV caches, and a model small enough
for the real thing.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vcache_backend.vram_pool.copies.copier import CopyJob, HostCopier
from vcache_backend.vram_pool.copies.geometry import PagedKV, placed, slot_rows

BLOCK, BLOCKS = 4, 12

LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "hidden_act": "silu"}"""


class HFConfig:
    """A Hugging Face configuration as transformers has it: values, some private, and what is
    written about it.
    """

    def __init__(self, **values: Any) -> None:
        rotary = {"rope_theta": 10000.0, "rope_type": "default"}
        self.__dict__.update({"hidden_size": 256, "rope_parameters": rotary} | values)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


def attention(name: str) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name))


LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


MODEL: dict[str, Any] = {"model": "org/model", "model_weights": "", "revision": "abc123"}
MODEL |= {"dtype": torch.bfloat16, "quantization": None, "multimodal_config": None}
MODEL |= {"enable_prompt_embeds": False, "enable_sleep_mode": False, "sleep_mode_backend": "cumem"}
MODEL |= {
    "enable_cumem_allocator": False,
    "is_prefix_caching_supported": True,
    "pooler_config": object(),
    "use_mla": False,
}
MODEL |= {"disable_sliding_window": False, "get_total_num_hidden_layers": lambda: 6}
MODEL |= {"get_total_num_kv_heads": lambda: 4, "get_head_size": lambda: 8, "max_model_len": 2048}
MODEL |= {"generation_config": "auto", "override_generation_config": {}}
PARALLEL = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_fault_tolerance": False}
PARALLEL |= {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
CACHE: dict[str, Any] = {"block_size": BLOCK, "enable_prefix_caching": True, "cache_dtype": "auto"}
CACHE |= {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None}
CACHE |= {"prefix_caching_hash_algo": "sha256", "kv_cache_dtype_skip_layers": []}


def vllm_config(**changes: Any) -> Any:
    """`changes`: `section__name=value`."""
    hf_config = HFConfig(_name_or_path="org/model", transformers_version="5.0")
    layers = {name: attention("FLASH_ATTN") for name in LAYERS}
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config, **MODEL),
        parallel_config=SimpleNamespace(**PARALLEL),
        cache_config=SimpleNamespace(**CACHE),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        device_config=SimpleNamespace(device_type="cuda"),
        load_config=SimpleNamespace(load_format="auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        aux_output_config=SimpleNamespace(enabled=False),
        **dict.fromkeys(("speculative_config", "lora_config", "weight_transfer_config")),
    )
    for path, value in changes.items():
        section, _, name = path.partition("__")
        setattr(getattr(config, section) if name else config, name or section, value)
    return config


def caches(blocks: int = BLOCKS, block_size: int = BLOCK) -> dict[str, Tensor]:
    return {name: torch.zeros((blocks, 2, block_size, 16), dtype=torch.bfloat16) for name in LAYERS}


def comes_back(kv: PagedKV, chunk_size: int) -> bool:
    """Whether a chunk of random bytes, gathered into a slot and pulled from it, is as before, and
    all other blocks are, too. Last block first: a copy that ignores block ids then shows.
    """
    slot = torch.zeros(kv.chunk_bytes(chunk_size), dtype=torch.uint8)
    pages = [page.random_(256) for kind in kv.kinds for page in kind.pages]
    before, count = [page.clone() for page in pages], min(kv.blocks_in(chunk_size), kv.num_blocks)
    plan, copier = placed(kv, np.arange(count - 1, -1, -1)), HostCopier()
    rows = slot_rows(kv, chunk_size, plan, np.array([slot.data_ptr()]))
    copier.copy(CopyJob(kv, *rows, to_origin=True))
    for page in pages:
        page[:count] = ~page[:count]
    copier.copy(CopyJob(kv, *rows))
    return all(map(torch.equal, pages, before))


def through_vllm(*workers: dict[str, Any]) -> Any:
    """One step's output of several workers, each pickled, as vLLM's executor puts it together for
    the scheduler.
    """
    import pickle

    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    told = [pickle.loads(pickle.dumps(KVConnectorOutput(**fields))) for fields in workers]
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=each) for each in told]
    together = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert together is not None
    assert together.kv_connector_output is not None
    return together.kv_connector_output
