"""The vLLM instances a run may start: each a variant of what users would set, on one GPU, of one
kind of model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from . import states
from .environment import on_one_gpu
from .scale import Scale

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    # All layers are dense: experts have no part in the KV cache.
    "first_k_dense_replace": 4,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
TINY = states.TINY | {"query_pre_attn_scalar": 64, "sliding_window": 64}
"""Of either of them, on the CPU."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the plain instance. model: its config, or with `over` what to change of the
    plain one. tiny: what to change of it on the CPU. block: tokens a KV block, 0: the scale's.
    states: vcache keeps states, and a chunk is one block, on the CPU of the scale's chunk.
    value_bytes: of a number in the KV cache. arguments: of vLLM's `LLM`. environment: for its
    processes. isolated: as in a container of its own, where it sees one GPU. tensor_parallel,
    pipeline_parallel: over how many GPUs."""

    model: dict[str, Any] = {}
    tiny: dict[str, Any] = {}
    over: bool = False
    block: int = 0
    states: bool = False
    value_bytes: int = 2
    arguments: dict[str, Any] = {}
    environment: dict[str, str] = {}
    isolated: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shares_code(self) -> bool:
        """Whether vLLM compiles it and keeps that for other processes. It keeps nothing where
        batches are invariant.
        """
        compiles = (
            not self.arguments.get("enforce_eager")
            and self.arguments.get("compilation_config", {}).get("mode") != 0
        )
        return compiles and "VLLM_BATCH_INVARIANT" not in self.environment

    def of(self, scale: Scale) -> Scale:
        """The scale as instances of this kind have it: as many tokens fit into their KV cache as
        into the plain one's.
        """
        model = {**(scale.model if self.over else {}), **self.model} if self.model else scale.model
        model |= self.tiny if scale.cpu else {}
        own = msgspec.structs.replace(scale, model=model, block=self.block or scale.block)
        if self.states:
            size = scale.chunk if scale.cpu else self.block
            own = msgspec.structs.replace(own, block=size, chunk=size)
        kv_bytes = scale.kv_bytes // scale.token_bytes * own.token_bytes * self.value_bytes // 2
        return msgspec.structs.replace(own, kv_bytes=kv_bytes)


KINDS = {
    "": Kind(),
    "eager": Kind(arguments={"enforce_eager": True}),
    "isolated": Kind(arguments={"enforce_eager": True}, isolated=True),
    # On one GPU nothing is compiled: vLLM may not have saved its last rank's code when the first
    # rank's is there.
    "tp2": Kind(tensor_parallel=2, arguments={"enforce_eager": True} if on_one_gpu() else {}),
    "pp2": Kind(pipeline_parallel=2, arguments={"enforce_eager": True}),
    "fp8": Kind(value_bytes=1, arguments={"kv_cache_dtype": "fp8"}),
    # 64 tokens a block is what the MLA kernels of Hopper take.
    "mla": Kind(model=DEEPSEEK, block=64),
    "gemma3": Kind(
        model=GEMMA3,
        tiny=TINY | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        arguments={"enforce_eager": True},
    ),
    "gptoss": Kind(
        model=GPT_OSS,
        tiny=TINY
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4},
        arguments={"enforce_eager": True},
    ),
    # Blocks of a multiple of what kernels want in which a state has room: vLLM makes no others of
    # them (its `platforms/interface.py`). Nobody tries which of Triton's kernels is the fastest:
    # instances that choose others differ in the last bit.
    "state_mamba2": Kind(
        model=states.GRANITE, tiny=states.TINY_GRANITE, states=True, block=768, **states.EAGER
    ),
    "state_conv": Kind(
        model=states.LFM2, tiny=states.TINY_LFM2, states=True, block=256, **states.EAGER
    ),
    "state_graphs": Kind(
        model=states.GRANITE, tiny=states.TINY_GRANITE, states=True, block=768, **states.GRAPHS
    ),
    # By itself vLLM takes FlashInfer on Hopper, be it there or not.
    "state_gdn": Kind(
        model=states.QWEN3_NEXT,
        tiny=states.TINY_QWEN3_NEXT,
        states=True,
        block=768,
        arguments=states.EAGER["arguments"] | {"gdn_prefill_backend": "triton"},
        environment=states.EAGER["environment"],
    ),
    # So few words that what comes out has been there before, and drafts are made and sometimes
    # right.
    "ngram": Kind(
        model={"vocab_size": 64},
        over=True,
        arguments={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
            }
        },
    ),
    # Where requests are many and short.
    "busy": Kind(arguments={"max_num_seqs": 128}),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. variant: alone, vcache (as the run's integration has it), lmcache (vcache
    through LMCache in any run). role: producer, consumer or both (""). scheduler: a function of
    `scheduler`. below: with an offload tier."""

    variant: str
    gpu: int
    kind: str = ""
    role: str = ""
    scheduler: str = ""
    below: bool = False


def _trio(
    prefix: str, kind: str, reader: str = "", below: bool = False, alone: str = "in_chunks"
) -> dict[str, Spec]:
    """The reference, who stores and who hits, of one kind. reader, alone: the schedulers of who
    hits, and of the reference.
    """
    return {
        f"{prefix}alone": Spec(variant="alone", gpu=0, kind=kind, scheduler=alone),
        f"{prefix}a": Spec(variant="vcache", gpu=0, kind=kind, below=below),
        f"{prefix}b": Spec(
            variant="vcache", gpu=KINDS[kind].gpus, kind=kind, scheduler=reader, below=below
        ),
    }


INSTANCES = {
    **_trio("", ""),
    "lm_a": Spec(variant="lmcache", gpu=0),
    "lm_b": Spec(variant="lmcache", gpu=1),
    "timed": Spec(variant="vcache", gpu=1, scheduler="probed"),
    **_trio("tp2_", "tp2"),
    **_trio("pp2_", "pp2"),
    "producer": Spec(variant="vcache", gpu=0, role="producer"),
    "consumer": Spec(variant="vcache", gpu=1, role="consumer"),
    **_trio("eager_", "eager"),
    **_trio("isolated_", "isolated"),
    **_trio("fp8_", "fp8"),
    **_trio("mla_", "mla"),
    **_trio("ngram_", "ngram"),
    **_trio("gemma3_", "gemma3", alone=""),
    **_trio("gptoss_", "gptoss", alone=""),
    **_trio("state_mamba2_", "state_mamba2", alone="known"),
    **_trio("state_conv_", "state_conv", alone="known"),
    **_trio("state_gdn_", "state_gdn", alone="known"),
    **_trio("state_graphs_", "state_graphs", alone="known"),
    **_trio("busy_", "busy"),
    **_trio("below_eager_", "eager", below=True),
}
"""Those with the scheduler `in_chunks` are what others are compared with."""
