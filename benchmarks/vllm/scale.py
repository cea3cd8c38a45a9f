"""How large everything is: the model's shape, the lengths, the memory; on two GPUs, and tiny on the
CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vcache_backend.config import ByteSize
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
    """lengths: tokens by the name rows give them. equal: prompts by length, and partial hits
    (see `prompts.hits`).

    kv_bytes: vLLM's KV cache of each instance. pool_bytes: what each instance lends to the pool.
    decode_prompt: tokens of requests that run beside."""

    name: str
    model: dict[str, Any]
    chunk: int
    block: int
    lengths: dict[str, int]
    equal: dict[int, int]
    partial: int
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

    @property
    def units(self) -> tuple[int, int, int]:
        """Of `Prompts`: the vocabulary, and tokens of a chunk and of a block."""
        return self.vocabulary, self.chunk, self.block

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
