"""How large everything is: the model's shape, the lengths, the memory; on two GPUs, and tiny on the
CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

GIB = 1 << 30
MIB = 1 << 20
SHAPES: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("models.json").read_bytes()
)
"""A `config.json` for each model: few layers, real widths. What begins with `tiny_` changes another
one for the CPU.
"""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """lengths: tokens by the name rows give them. equal: prompts by length, whole and partial hits
    (see `prompts.hits`).

    kv_bytes: vLLM's KV cache of each instance. pool_bytes: what each instance lends to the pool.
    decode_prompt: tokens of requests that run beside. whole_blocks: hits end with a whole block of
    vLLM's, as those of our own connector do, not with the last token but one."""

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
    whole_blocks: bool = False
    cpu: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token, in bfloat16."""
        if "kv_lora_rank" in self.model:
            row = 2 * (self.model["kv_lora_rank"] + self.model["qk_rope_head_dim"])
        else:
            row = 4 * self.model["head_dim"] * self.model["num_key_value_heads"]
        return int(row * self.model["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        return int(self.model["vocab_size"])

    def hit(self, length: int) -> int:
        """Tokens that can be known of a prompt of so many: whole chunks, and the last token is
        computed in any case.

        By LMCache it alone, by our connector the block it is in, as after a hit in vLLM's own
        prefix cache."""
        most = (length - 1) // self.block * self.block if self.whole_blocks else length - 1
        return min(length - length % self.chunk, most)


FULL = Scale(
    name="full",
    model=SHAPES["llama_8b"],
    chunk=256,
    block=16,
    lengths={"1k": 1024, "4k": 4096, "16k": 16384, "32k": 32768},
    equal={1023: 38, 1024: 38, 1025: 38, 4096: 24, 16384: 12, 32768: 6},
    partial=44,
    few=[1023, 1024, 1025, 4096],
    kv_bytes=10 * GIB,
    pool_bytes=16 * GIB,
    max_model_len=33280,
    batched_tokens=8192,
    decode_prompt=256,
)
BESIDE = msgspec.structs.replace(
    FULL,
    name="beside",
    model=FULL.model | {"num_hidden_layers": 8},
    kv_bytes=GIB * 3 // 2,
    pool_bytes=3 * GIB,
)
"""For three runs beside each other on GPUs of 80 GiB, and for ranks that share a GPU."""
TINY = Scale(
    name="tiny",
    model=SHAPES["llama_tiny"],
    chunk=64,
    block=32,
    lengths={"1k": 64, "4k": 128, "16k": 512, "32k": 1024},
    equal={127: 1, 128: 1, 129: 1, 512: 1},
    partial=2,
    few=[127, 128, 129],
    kv_bytes=5 * MIB // 2,
    pool_bytes=16 * MIB,
    max_model_len=1536,
    batched_tokens=1024,
    decode_prompt=32,
    answer=8,
    running=2,
    cpu=True,
)
SCALES = {scale.name: scale for scale in (FULL, BESIDE, TINY)}
