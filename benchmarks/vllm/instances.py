"""The vLLM instances a run may start: each a variant of what users would set, on one GPU, of one
kind of model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .scale import SHAPES, Scale

EAGER: dict[str, Any] = {"enforce_eager": True}


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the plain instance. model: its config, or with `over` what to change of the
    plain one. tiny: what to change of it on the CPU, or with `other` the model that takes its place
    there. block: tokens a KV block, 0: the scale's. states: vcache keeps states, and a chunk is one
    block, on the CPU of the scale's chunk. value_bytes: of a number in the KV cache. head: what is
    different in its EAGLE head; empty: none. arguments: of vLLM's `LLM`. environment: for its
    processes. ranks: over how many GPUs, by `split`, an argument of `LLM`. settings: of vcache's
    configuration, `SECTION.KEY` by value. alone: the reference's scheduler; with `in_chunks` others
    are compared with it."""

    model: dict[str, Any] = {}
    tiny: dict[str, Any] = {}
    other: bool = False
    over: bool = False
    block: int = 0
    states: bool = False
    value_bytes: int = 2
    head: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    environment: dict[str, str] = {}
    ranks: int = 1
    split: str = "tensor_parallel_size"
    settings: dict[str, str] = {}
    alone: str = "in_chunks"

    def of(self, scale: Scale) -> Scale:
        """The scale as instances of this kind have it: as many tokens fit into their KV cache as
        into the plain one's.
        """
        model = {**(scale.model if self.over else {}), **self.model} if self.model else scale.model
        if scale.cpu:
            model = self.tiny if self.other else model | self.tiny
        own = msgspec.structs.replace(scale, model=model, block=self.block or scale.block)
        if self.states:
            size = scale.chunk if scale.cpu else self.block
            own = msgspec.structs.replace(own, block=size, chunk=size)
        kv_bytes = scale.kv_bytes // scale.token_bytes * own.token_bytes * self.value_bytes // 2
        return msgspec.structs.replace(own, kv_bytes=kv_bytes)


def _shaped(name: str, tiny: str, **more: Any) -> Kind:
    """A kind with a model of `models.json`, eager."""
    arguments = EAGER | more.pop("arguments", {})
    return Kind(model=SHAPES[name], tiny=SHAPES[tiny], arguments=arguments, **more)


def _stateful(name: str, block: int, **arguments: Any) -> Kind:
    """A kind with states. block: a multiple of what kernels want in which a state has room, since
    vLLM makes no others (its `platforms/interface.py`).

    Nobody tries which of Triton's kernels is the fastest: instances that choose others differ in
    the last bit."""
    given = {"arguments": arguments, "environment": {"VLLM_TRITON_FORCE_FIRST_CONFIG": "1"}}
    return _shaped(name, f"tiny_{name}", states=True, block=block, alone="", **given)


def _sparse(**arguments: Any) -> Kind:
    """A kind with DeepSeek V3.2's layers: the indexer's keys have pages of another size than the
    latents. The default top-k of decode steps may order equal scores differently each time, as that
    of prefill does (`weights.order_choices`). After a hit and without one the same kernel
    computes."""
    model = SHAPES["deepseek"] | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 768,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    }
    fixed = EAGER | {
        "sparse_indexer_topk_backend": "torch",
        "attention_config": {"backend": "FLASHMLA_SPARSE", "sparse_mla_force_mqa": True},
    }
    return Kind(model=model, block=64, arguments=fixed | arguments)


def _experts(model: dict[str, Any], tiny: str, **more: Any) -> Kind:
    """A kind whose experts are spread over the data parallel ranks of one server, compiled and with
    CUDA graphs, as users run it.
    """
    arguments = {
        "enable_expert_parallel": True,
        "worker_extension_cls": f"{__package__}.extension.Extension",
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    }
    return Kind(model=model, tiny=SHAPES[tiny], arguments=arguments, **more)


KINDS = {
    "": Kind(),
    "tp2": Kind(ranks=2),
    "pp2": Kind(ranks=2, split="pipeline_parallel_size"),
    "fp8": Kind(value_bytes=1, arguments={"kv_cache_dtype": "fp8"}),
    # 64 tokens a block is what the MLA kernels of Hopper take. All layers are dense: experts have
    # no part in the KV cache.
    "mla": Kind(model=SHAPES["deepseek"], block=64),
    "sparse": _sparse(),
    "sparse_fp8": _sparse(kv_cache_dtype="fp8_ds_mla"),
    "gemma3": _shaped("gemma3", "tiny_gemma3", alone=""),
    "gptoss": _shaped("gpt_oss", "tiny_gpt_oss", alone=""),
    "state_mamba2": _stateful("granite", 768),
    "state_conv": _stateful("lfm2", 256),
    "v3": _experts(SHAPES["deepseek_v3"], "tiny_mixtral", block=64, other=True),
    # All layers and experts of gpt-oss-20b, at two bytes a weight.
    "oss20b": _experts(
        SHAPES["gpt_oss"]
        | {
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "layer_types": SHAPES["gpt_oss"]["layer_types"] * 3,
        },
        "tiny_gpt_oss",
    ),
    # By itself vLLM takes FlashInfer on Hopper, be it there or not.
    "state_gdn": _stateful("qwen3_next", 768, gdn_prefill_backend="triton"),
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
    # An EAGLE head whose pages are twice as large as those of the model's layers.
    "head": Kind(head={"num_key_value_heads": 16}, arguments=EAGER),
    # Where requests are many and short.
    "busy": Kind(arguments={"max_num_seqs": 128}),
    "versions": Kind(settings={"connector.weights": "start"}),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. alone: without vcache. scheduler: a function of `scheduler`."""

    gpu: int
    alone: bool = False
    kind: str = ""
    scheduler: str = ""


def _trio(kind: str) -> dict[str, Spec]:
    """The reference, who stores and who hits, of one kind."""
    alone = KINDS[kind].alone
    return {
        joined(kind, "alone"): Spec(gpu=0, alone=True, kind=kind, scheduler=alone),
        joined(kind, "a"): Spec(gpu=0, kind=kind),
        joined(kind, "b"): Spec(gpu=KINDS[kind].ranks, kind=kind),
    }


def joined(*parts: str) -> str:
    """The name of an instance, or of a row. Parts may be empty, as the plain kind's name is."""
    return "_".join(filter(None, parts))


INSTANCES = {"timed": Spec(gpu=1, scheduler="probed"), "c": Spec(gpu=2), "d": Spec(gpu=3)}
for _kind in KINDS:
    INSTANCES |= _trio(_kind)
