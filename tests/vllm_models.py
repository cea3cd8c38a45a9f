"""The tiny model of the tests with real vLLM, and adapters for it: what they answer depends on every token of the prompt."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

VOCABULARY = 1024
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD, _MLP = 256, 4, 4, 2, 64, 512
TOKEN_BYTES = 4 * 2 * 64 * 2 * 2
"""Layers, KV heads, head size, K and V, bfloat16."""


def write_model(folder: Path, windowed: str = "", window: int = 0) -> Path:
    """A Llama whose output depends on every token of the prompt: random weights of a fixed seed, scaled so that attention matters.

    windowed: one letter a layer; those with an s look at the last `window` tokens only, so that they are groups of their own."""
    import torch
    from safetensors.torch import save_file

    random_ = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random_) * gain / math.sqrt(columns)).to(torch.bfloat16)

    def norm() -> torch.Tensor:
        return torch.ones(_HIDDEN, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN, math.sqrt(_HIDDEN)),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN, 3.0),
    }
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN, 1.6),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN, 1.6),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN, 4.0),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD, 4.0),
        "mlp.gate_proj": (_MLP, _HIDDEN, 1.0),
        "mlp.up_proj": (_MLP, _HIDDEN, 1.0),
        "mlp.down_proj": (_HIDDEN, _MLP, 1.0),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "intermediate_size": _MLP,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if windowed:
        config |= {
            "layer_types": ["sliding_attention" if letter == "s" else "full_attention" for letter in windowed],
            "sliding_window": window,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_lora(folder: Path, seed: int) -> Path:
    """A LoRA adapter of that model which changes K and V, and so what a prefix's cache holds."""
    import torch
    from safetensors.torch import save_file

    random_, rank, weights = torch.Generator().manual_seed(seed), 8, {}
    for layer, name in itertools.product(range(_LAYERS), ("k_proj", "v_proj")):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, _HIDDEN, generator=random_) / math.sqrt(_HIDDEN)
        weights[f"{prefix}.lora_B.weight"] = torch.randn(_KV_HEADS * _HEAD, rank, generator=random_)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
