"""The vLLM instances a run may start: each a variant of what users would set, on one GPU, of one
kind of model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .scale import SHAPES, Scale


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the plain instance. model: its config, or with `over` what to change of the
    plain one. tiny: what to change of it on the CPU. block: tokens a KV block, 0: the scale's.
    value_bytes: of a number in the KV cache. arguments: of vLLM's `LLM`. ranks: tensor parallel,
    each on a GPU. tail: see `Prompts`. several: block tables. states: a chunk is one block."""

    model: dict[str, Any] = {}
    tiny: dict[str, Any] = {}
    over: bool = False
    block: int = 0
    value_bytes: int = 2
    arguments: dict[str, Any] = {}
    ranks: int = 1
    tail: int = 8
    several: bool = False
    states: bool = False

    def of(self, scale: Scale) -> Scale:
        """The scale as instances of this kind have it: as many tokens fit into their KV cache as
        into the plain one's.
        """
        model = {**(scale.model if self.over else {}), **self.model} if self.model else scale.model
        model = model | self.tiny if scale.cpu else model
        block = scale.chunk if self.states else self.block or scale.block
        own = msgspec.structs.replace(scale, model=model, block=block)
        kv_bytes = scale.kv_bytes // scale.token_bytes * own.token_bytes * self.value_bytes // 2
        return msgspec.structs.replace(own, kv_bytes=kv_bytes)


def _several(name: str, graphs: bool = False, **more: Any) -> Kind:
    """With several block tables. graphs: compiled, with CUDA graphs, as users have it. Without they
    start sooner, and for a comparison of answers that is enough."""
    model, tiny = SHAPES[name], SHAPES[f"tiny_{name}"]
    arguments = ({} if graphs else {"enforce_eager": True}) | more.pop("arguments", {})
    return Kind(model=model, tiny=tiny, arguments=arguments, several=True, **more)


DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
KINDS = {
    "": Kind(),
    "tp2": Kind(ranks=2),
    "fp8": Kind(value_bytes=1, arguments={"kv_cache_dtype": "fp8"}),
    # 64 tokens a block is what the MLA kernels of Hopper take. All layers are dense: experts have
    # no part in the KV cache.
    "mla": Kind(model=SHAPES["deepseek"], block=64),
    # So few words that what comes out has been there before, and drafts are made and sometimes
    # right.
    "ngram": Kind(model={"vocab_size": 64}, over=True, arguments={"speculative_config": DRAFTS}),
    "gemma3": _several("gemma3"),
    "gpt_oss": _several("gpt_oss"),
    "gemma3_graphs": _several("gemma3", graphs=True),
    "gpt_oss_graphs": _several("gpt_oss", graphs=True),
    # Its convolutions look back at two tokens: the last token depends on the loaded state.
    "lfm2": _several("lfm2", tail=2, states=True),
    # In place hits end with vLLM's blocks, of whatever size vLLM gives them.
    "conv": _several("lfm2", tail=2),
    "mamba2": _several("granite4"),
    # vLLM's default on Hopper wants FlashInfer.
    "gdn": _several("qwen3_next", arguments={"gdn_prefill_backend": "triton"}),
    # Where requests are many and short.
    "busy": Kind(arguments={"max_num_seqs": 128}),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. alone: without vcache. probed: its scheduler is (see `probe`)."""

    gpu: int
    alone: bool = False
    kind: str = ""
    probed: bool = False


def joined(*parts: str) -> str:
    """The name of an instance, or of a row. Parts may be empty, as the plain kind's name is."""
    return "_".join(filter(None, parts))


INSTANCES = {"timed": Spec(gpu=1, probed=True)}
for _name, _kind in KINDS.items():
    # The reference, who stores and who hits.
    INSTANCES[joined(_name, "alone")] = Spec(gpu=0, alone=True, kind=_name)
    INSTANCES[joined(_name, "a")] = Spec(gpu=0, kind=_name)
    INSTANCES[joined(_name, "b")] = Spec(gpu=_kind.ranks, kind=_name)
