"""The tiny model of the tests with real vLLM, and adapters for it: what they answer depends on
every token of the prompt.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.vllm.instances import TINY

CONNECTOR: dict[str, Any] = {"kv_connector": "VCacheConnector"}
"""Of `kv_transfer_config`: which connector, by the name that our plugin registers."""
VOCABULARY = 1024
_HIDDEN, LAYERS, _KV_HEADS, _HEAD, _MLP = 64, 2, 2, 64, 64
"""Of the benchmarks' tiny Llama. It is narrow: a CPU without bfloat16 multiplies slowly. It has few
layers: most of what these tests take is the time in them."""
TOKEN_BYTES = LAYERS * _KV_HEADS * _HEAD * 2 * 2
"""Layers, KV heads, head size, K and V, bfloat16."""


def write_model(
    folder: Path, windowed: str = "", window: int = 0, seed: int = 1, heads: int = 0
) -> Path:
    """The benchmarks' tiny Llama, whose output depends on every token of the prompt, with random
    weights of this seed.

    windowed: one letter a layer; those with an s look at the last `window` tokens only, so that
    they are groups of their own. heads: so many, where vLLM derives their length from the width."""
    model = TINY.model | {"rope_theta": 10000.0}
    if heads:
        model |= {"num_attention_heads": heads, "hidden_size": heads * _HEAD}
    if windowed:
        kinds = {"s": "sliding_attention", "f": "full_attention"}
        model |= {"layer_types": [kinds[letter] for letter in windowed], "sliding_window": window}
        model |= {"num_hidden_layers": len(windowed)}
    return msgspec.structs.replace(TINY, model=model).write_model(folder, seed)


def write_lora(folder: Path, seed: int) -> Path:
    """A LoRA adapter of that model which changes K and V, and so what a prefix's cache holds."""
    import torch

    random_, rank, weights = torch.Generator().manual_seed(seed), 8, {}
    for layer, name in itertools.product(range(LAYERS), ("k_proj", "v_proj")):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        reads = torch.randn(rank, _HIDDEN, generator=random_)
        weights[f"{prefix}.lora_A.weight"] = reads / math.sqrt(_HIDDEN)
        weights[f"{prefix}.lora_B.weight"] = torch.randn(_KV_HEADS * _HEAD, rank, generator=random_)
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "adapter_model.safetensors", weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_guessed(folder: Path, windowed: str = "", window: int = 0) -> Path:
    """That model, of whose layers the first one says nearly all: what a head of one layer guesses
    is right every now and then.
    """

    def above_all(weights: dict[str, Any]) -> dict[str, Any]:
        return {
            name: one / 50 if ".layers.0." not in name and name.split(".")[-2] in ends else one
            for name, one in weights.items()
        }

    ends = "o_proj", "down_proj"
    return _changed(write_model(folder, windowed, window), above_all)


def write_eagle(folder: Path, repeat: int = 1) -> Path:
    """An EAGLE head of it: its first layer, for the token that comes next.

    repeat: how many KV heads it has for one of the model's, all equal."""
    import torch

    def repeated(name: str, weight: Any) -> Any:
        if ".k_proj." not in name and ".v_proj." not in name:
            return weight
        heads = weight.view(_KV_HEADS, _HEAD, _HIDDEN).repeat_interleave(repeat, 0)
        return heads.reshape(-1, _HIDDEN).contiguous()

    def head(weights: dict[str, Any]) -> dict[str, Any]:
        layer = {
            name.removeprefix("model."): repeated(name, one)
            for name, one in weights.items()
            if ".layers.0." in name and "input_" not in name
        }
        return layer | {"fc.weight": torch.eye(_HIDDEN, 2 * _HIDDEN)}

    kind = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    kind |= {"num_key_value_heads": repeat * _KV_HEADS}
    return _changed(write_model(folder), head, **kind)


def _changed(
    folder: Path, weights: Callable[[dict[str, Any]], dict[str, Any]], **config: Any
) -> Path:
    """The model in `folder` with other weights, and what else its configuration says."""
    from safetensors.torch import load_file

    _save(folder / "model.safetensors", weights(load_file(folder / "model.safetensors")))
    told = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def _save(file: Path, weights: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({name: one.to(torch.bfloat16) for name, one in weights.items()}, str(file))


def write_states(folder: Path) -> Path:
    """A model of its sizes, an LFM 2, half of whose layers keep a state: of two tokens, which
    matter as much as all others.
    """
    import torch

    width, random_ = _KV_HEADS * _HEAD, torch.Generator().manual_seed(3)
    named = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "feed_forward"}
    named |= {"self_attn.o_proj": "self_attn.out_proj", "input_layernorm": "operator_norm"}
    named |= {"post_attention_layernorm": "ffn_norm", "model.norm": "model.embedding_norm"}
    shapes = {"conv": (width, 1, 3), "in_proj": (3 * width, width), "out_proj": (width, width)}

    def mixed(weights: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, weight in weights.items():
            for old, new in named.items():
                name = name.replace(old, new)
            if name != "lm_head.weight" and (
                "self_attn" not in name or int(name.split(".")[2]) % 2
            ):
                found[name] = weight
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            if layer % 2:
                for one in "qk":
                    found[f"{prefix}self_attn.{one}_layernorm.weight"] = torch.ones(_HEAD)
                continue
            for name, shape in shapes.items():
                gain = 1.4 / math.sqrt(shape[-1])
                weight = torch.randn(shape, generator=random_) * gain
                found[f"{prefix}conv.{name}.weight"] = weight
        return found

    kind = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "norm_eps": 1e-5}
    kind |= {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "conv_L_cache": 3}
    kind |= {"conv_dim": width, "block_dim": width, "block_ff_dim": _MLP}
    kind |= {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}
    return _changed(write_model(folder, heads=_KV_HEADS), mixed, **kind)
