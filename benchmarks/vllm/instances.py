"""The vLLM instances that a run may start: how large everything is, on GPUs and tiny on the CPU,
and variants of what users would set, each on one GPU, of one kind of model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vcache_backend.config import ByteSize
from vcache_backend.prove.comparison import Prompts
from vcache_backend.prove.model import TINY_LLAMA, write_model

Sized = TypeVar("Sized")
GIB = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "llama_tiny": TINY_LLAMA,
    **msgspec.json.decode(Path(__file__).with_name("models.json").read_bytes()),
}
"""A `config.json` for each model: few layers, real widths. What begins with `tiny_` changes another
one for the CPU.
"""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """lengths: tokens by the name rows give them. equal: how many prompts by length (see
    `Prompts.hits`).

    kv_bytes: vLLM's KV cache of each instance. pool_bytes: what each instance lends to the pool.
    decode_prompt: tokens of requests that run beside."""

    name: str
    model: dict[str, Any]
    chunk: int
    block: int
    lengths: dict[str, int]
    equal: dict[int, int]
    few: list[int]
    kv_bytes: int
    pool_bytes: int
    max_model_len: int
    batched_tokens: int
    decode_prompt: int
    answer: int = 64
    running: int = 16
    cpu: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token, in bfloat16."""
        if "kv_lora_rank" in self.model:
            row = 2 * (self.model["kv_lora_rank"] + self.model["qk_rope_head_dim"])
        else:
            row = 4 * self.model["head_dim"] * self.model["num_key_value_heads"]
        return int(row * self.model["num_hidden_layers"])

    def hit_bytes(self, tokens: int) -> int:
        """Bytes of KV that a hit of so many tokens needs; of states none."""
        kinds = self.model.get("layer_types", ["full_attention"])
        kept = {"full_attention": tokens}
        kept["sliding_attention"] = min(tokens, self.model.get("sliding_window") or tokens)
        return self.token_bytes * sum(kept.get(kind, 0) for kind in kinds) // len(kinds)

    @property
    def vocabulary(self) -> int:
        return int(self.model["vocab_size"])

    def prompts(self, in_place: bool, seed: int = 1, tail: int = 8) -> Prompts:
        """For instances that share so. See `Prompts`."""
        chunk = self.block if in_place else self.chunk
        return Prompts(self.vocabulary, chunk, self.block, seed, tail)

    def write_model(self, folder: Path, seed: int = 1) -> Path:
        """A folder that vLLM takes for the model; see `prove.model`. Only the tiny Llama, and those
        for the CPU like it, bring weights."""
        brings = self.cpu and self.model["model_type"] == "llama"
        return write_model(folder, self.model, brings, seed)


def sized(given: dict[str, Any], kind: type[Sized], **more: Any) -> Sized:
    """A struct from JSON, whose sizes in bytes have units."""
    sizes = {key: int(ByteSize.parse(given[key])) for key in given if key.endswith("_bytes")}
    return msgspec.convert({**given, **sizes, **more}, kind, str_keys=True)


def _scale(name: str, given: dict[str, Any]) -> Scale:
    given = _GIVEN.get(given.get("like", ""), {}) | given
    model = SHAPES[given["model"]]
    layers = given.get("layers", model["num_hidden_layers"])
    return sized(given, Scale, name=name, model=model | {"num_hidden_layers": layers})


_GIVEN = msgspec.json.decode(Path(__file__).with_name("scales.json").read_bytes())
SCALES = {name: _scale(name, given) for name, given in _GIVEN.items()}
"""`full`: of two GPUs. `beside`: for three runs beside each other on GPUs of 80 GiB, and for ranks
that share a GPU. `tiny`: on the CPU."""
TINY = SCALES["tiny"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the plain instance. model: its config, or what to change of the plain
    one's. tiny: what to change of it on the CPU. block: tokens a KV block, 0: the scale's.
    value_bytes: of a number in the KV cache. arguments: of vLLM's `LLM`. ranks: tensor parallel,
    each on a GPU. tail: see `Prompts`. several: block tables. states: a chunk is one block. few:
    lengths of prompts, if not the scale's. apart: ends of layers' names, whose KV must count by
    itself."""

    model: dict[str, Any] = {}
    tiny: dict[str, Any] = {}
    block: int = 0
    value_bytes: int = 2
    arguments: dict[str, Any] = {}
    ranks: int = 1
    tail: int = 8
    several: bool = False
    states: bool = False
    few: list[int] = []
    apart: list[str] = []

    def of(self, scale: Scale) -> Scale:
        """The scale as instances of this kind have it: as many tokens fit into their KV cache as
        into the plain one's.
        """
        model = self.model if "model_type" in self.model else scale.model | self.model
        model = model | self.tiny if scale.cpu else model
        block = scale.chunk if self.states else self.block or scale.block
        own = msgspec.structs.replace(scale, model=model, block=block, few=self.few or scale.few)
        kv_bytes = scale.kv_bytes // scale.token_bytes * own.token_bytes * self.value_bytes // 2
        return msgspec.structs.replace(own, kv_bytes=kv_bytes)


def _several(name: str, graphs: bool = False, **more: Any) -> Kind:
    """With several block tables. graphs: compiled, with CUDA graphs, as users have it. Without they
    start sooner, and for a comparison of answers that is enough."""
    model, tiny = SHAPES[name], SHAPES[f"tiny_{name}"]
    arguments = ({} if graphs else {"enforce_eager": True}) | more.pop("arguments", {})
    return Kind(model=model, tiny=tiny, arguments=arguments, several=True, **more)


def _gpt_oss_20b() -> dict[str, Any]:
    few = SHAPES["gpt_oss"]
    layers = {"num_hidden_layers": 24, "layer_types": 3 * few["layer_types"]}
    return few | layers | {"num_local_experts": 32}


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
DRAFTS |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
KINDS = {
    "": Kind(),
    "tp2": Kind(ranks=2),
    "fp8": Kind(value_bytes=1, arguments={"kv_cache_dtype": "fp8"}),
    # 64 tokens a block is what the MLA kernels of Hopper take. All layers are dense: experts have
    # no part in the KV cache.
    "mla": Kind(model=SHAPES["deepseek"], block=64),
    # So few words that what comes out has been there before, and drafts are made and sometimes
    # right.
    "ngram": Kind(model={"vocab_size": 64}, arguments={"speculative_config": DRAFTS}),
    "gemma3": _several("gemma3"),
    "gpt_oss": _several("gpt_oss"),
    "gemma3_graphs": _several("gemma3", graphs=True),
    "gpt_oss_graphs": _several("gpt_oss", graphs=True),
    "tp2_gpt_oss_graphs": _several("gpt_oss", graphs=True, ranks=2),
    # As large as gpt-oss 20B but for its words, without quantization.
    "gpt_oss_20b": Kind(model=_gpt_oss_20b(), tiny=SHAPES["tiny_gpt_oss"], several=True),
    # Its convolutions look back at two tokens: the last token depends on the loaded state.
    "lfm2": _several("lfm2", tail=2, states=True),
    # In place hits end with vLLM's blocks, of whatever size vLLM gives them.
    "conv": _several("lfm2", tail=2),
    "mamba2": _several("granite4"),
    # vLLM's default on Hopper wants FlashInfer.
    "gdn": _several("qwen3_next", arguments={"gdn_prefill_backend": "triton"}),
    # A step's tokens take thousands of small blocks of windows and of compressors' states. Each
    # number of tokens a step may compile a kernel, 12 s, so lengths are few. Beyond 2,048 tokens
    # the indexer chooses what is looked at.
    "v4": Kind(
        few=[1024, 2048, 4096, 8192],
        apart=[".indexer.k_cache", ".attn"],
        model=SHAPES["deepseek_v4"],
        block=256,
        value_bytes=8,
        arguments={"enforce_eager": True},
        several=True,
    ),
    # Where requests are many and short.
    "busy": Kind(arguments={"max_num_seqs": 128}),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. alone: without vcache. probed: its connector is (see `probe`)."""

    gpu: int
    alone: bool = False
    kind: str = ""
    probed: bool = False
    role: str = "kv_both"


def joined(*parts: str) -> str:
    """The name of an instance, or of a row. Parts may be empty, as the plain kind's name is."""
    return "_".join(filter(None, parts))


INSTANCES = {
    "timed": Spec(gpu=1, probed=True),
    # For requests that decode, with `alone` on one GPU.
    "decodes": Spec(gpu=0, probed=True),
    "consumer": Spec(gpu=0, probed=True, role="kv_consumer"),
}
for _name, _kind in KINDS.items():
    # The reference, who stores and who hits.
    INSTANCES[joined(_name, "alone")] = Spec(gpu=0, alone=True, kind=_name)
    INSTANCES[joined(_name, "a")] = Spec(gpu=0, kind=_name)
    INSTANCES[joined(_name, "b")] = Spec(gpu=_kind.ranks, kind=_name)
