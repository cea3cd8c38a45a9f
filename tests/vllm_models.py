"""The tiny model of the tests with real vLLM, and adapters for it: what they answer depends on
every token of the prompt.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.vllm.scale import TINY
from benchmarks.vllm.weights import write_model as write

VOCABULARY = 1024
_HIDDEN, LAYERS, _HEADS, _KV_HEADS, _HEAD, _MLP = 64, 2, 4, 2, 64, 64
"""Of the benchmarks' tiny Llama. It is narrow: a CPU without bfloat16 multiplies slowly. It has few
layers: most of what these tests take is the time in them."""
_EXPERTS = 4
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
    return write(folder, msgspec.structs.replace(TINY, model=model), seed)


def write_lora(folder: Path, seed: int) -> Path:
    """A LoRA adapter of that model which changes K and V, and so what a prefix's cache holds."""
    import torch
    from safetensors.torch import save_file

    random_, rank, weights = torch.Generator().manual_seed(seed), 8, {}
    for layer, name in itertools.product(range(LAYERS), ("k_proj", "v_proj")):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(
            rank, _HIDDEN, generator=random_
        ) / math.sqrt(_HIDDEN)
        weights[f"{prefix}.lora_B.weight"] = torch.randn(_KV_HEADS * _HEAD, rank, generator=random_)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        str(folder / "adapter_model.safetensors"),
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_guessed(folder: Path, windowed: str = "", window: int = 0) -> Path:
    """That model, of whose layers the first one says nearly all: what a head of one layer guesses
    is right every now and then.
    """
    return _changed(write_model(folder, windowed, window), _first_layer_above_all)


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

    kind = {
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_key_value_heads": repeat * _KV_HEADS,
    }
    return _changed(write_model(folder), head, **kind)


def write_mtp(folder: Path) -> Path:
    """It as a MiMo, whose own last layer, for the token after the next one, is its first one."""
    import torch

    heads = _KV_HEADS
    width = heads * _HEAD

    def both(weights: dict[str, Any]) -> dict[str, Any]:
        found = _first_layer_above_all(weights)
        for layer in range(LAYERS):
            for name, count in (("q", heads), ("k", _KV_HEADS), ("v", _KV_HEADS)):
                found[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(
                    count * _HEAD
                )
        found |= {
            name.replace(".layers.", ".mtp_layers."): one.clone()
            for name, one in found.items()
            if ".layers.0." in name
        }
        found |= {
            f"model.mtp_layers.0.{name}_layernorm.weight": torch.ones(width)
            for name in ("token", "hidden", "final")
        }
        return found | {
            "model.mtp_layers.0.input_proj.weight": torch.eye(width, 2 * width).roll(width, 1)
        }

    kind = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    return _changed(write_model(folder, heads=heads), both, **kind)


def write_experts(folder: Path) -> Path:
    """It as a Mixtral, whose experts are its MLPs with their rows in other orders."""
    import torch

    random = torch.Generator().manual_seed(1)
    parts = {"w1": "gate", "w2": "down", "w3": "up"}

    def experts(weights: dict[str, Any]) -> dict[str, Any]:
        found = {name: one for name, one in weights.items() if ".mlp." not in name}
        for layer in range(LAYERS):
            path = f"model.layers.{layer}"
            block = f"{path}.block_sparse_moe"
            found[f"{block}.gate.weight"] = torch.randn(_EXPERTS, _HIDDEN, generator=random)
            for number in range(_EXPERTS):
                for name, old in parts.items():
                    one = weights[f"{path}.mlp.{old}_proj.weight"]
                    rows = torch.randperm(len(one), generator=random)
                    found[f"{block}.experts.{number}.{name}.weight"] = one[rows]
        return found

    kind = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
    }
    return _changed(write_model(folder), experts, **kind)


def _first_layer_above_all(weights: dict[str, Any]) -> dict[str, Any]:
    ends = "o_proj", "down_proj"
    return {
        name: one / 50 if ".layers.0." not in name and any(end in name for end in ends) else one
        for name, one in weights.items()
    }


def _changed(
    folder: Path, weights: Callable[[dict[str, Any]], dict[str, Any]], **config: Any
) -> Path:
    """The model in `folder` with other weights, and what else its configuration says."""
    import torch
    from safetensors.torch import load_file, save_file

    made = weights(load_file(folder / "model.safetensors"))
    save_file(
        {name: one.to(torch.bfloat16) for name, one in made.items()},
        str(folder / "model.safetensors"),
    )
    told = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def write_states(folder: Path) -> Path:
    """A model of its sizes, an LFM 2, half of whose layers keep a state: of two tokens, which
    matter as much as all others.
    """
    import torch
    from safetensors.torch import load_file, save_file

    width = _KV_HEADS * _HEAD
    config = json.loads((write_model(folder, heads=_KV_HEADS) / "config.json").read_text())
    random_ = torch.Generator().manual_seed(3)
    kinds = {
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "conv_L_cache": 3,
        "conv_dim": width,
        "block_dim": width,
    }
    feed_forward = {
        "block_ff_dim": _MLP,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **kinds, **feed_forward}
    (folder / "config.json").write_text(json.dumps(config))
    named = {
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "mlp": "feed_forward",
        "self_attn.o_proj": "self_attn.out_proj",
    }
    named |= {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "model.embedding_norm",
    }
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for old, new in named.items():
            name = name.replace(old, new)
        if name != "lm_head.weight" and ("self_attn" not in name or int(name.split(".")[2]) % 2):
            weights[name] = weight
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        if layer % 2:
            weights |= {
                f"{prefix}self_attn.{one}_layernorm.weight": torch.ones(_HEAD) for one in "qk"
            }
            continue
        for name, shape in (
            ("conv", (width, 1, 3)),
            ("in_proj", (3 * width, width)),
            ("out_proj", (width, width)),
        ):
            gain = 1.4 / math.sqrt(shape[-1])
            weights[f"{prefix}conv.{name}.weight"] = (
                torch.randn(shape, generator=random_) * gain
            ).to(torch.bfloat16)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        str(folder / "model.safetensors"),
    )
    return folder


IMAGE = VOCABULARY - 1
"""The token of a prompt in whose place vLLM puts an image."""
_PIXELS, _PATCH, _SEEN = 56, 14, 64


def write_vision_model(folder: Path) -> Path:
    """That model with eyes, an Idefics 3: one that needs neither torchvision nor anything from the
    hub.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = json.loads((write_model(folder) / "config.json").read_text())
    weights = {
        name.replace("model.", "model.text_model.", 1): one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    random_, patches = torch.Generator().manual_seed(2), (_PIXELS // _PATCH) ** 2
    layer = {
        f"self_attn.{name}": (_SEEN, _SEEN) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    }
    layer |= {
        "mlp.fc1": (_SEEN, _SEEN),
        "mlp.fc2": (_SEEN, _SEEN),
        "layer_norm1": (_SEEN,),
        "layer_norm2": (_SEEN,),
    }
    shapes = {f"encoder.layers.0.{name}": shape for name, shape in layer.items()} | {
        "post_layernorm": (_SEEN,)
    }
    shapes |= {
        "embeddings.patch_embedding": (_SEEN, 3, _PATCH, _PATCH),
        "embeddings.position_embedding": (patches, _SEEN),
    }
    for name, shape in shapes.items():
        gain = 1.0 / math.sqrt(math.prod(shape[1:]))
        weight = (
            torch.randn(shape, generator=random_) * gain if len(shape) > 1 else torch.ones(shape)
        )
        weights[f"model.vision_model.{name}.weight"] = weight.to(torch.bfloat16)
        weights[f"model.vision_model.{name}.bias"] = torch.zeros(shape[0], dtype=torch.bfloat16)
    del weights["model.vision_model.embeddings.position_embedding.bias"]
    seen = torch.randn(_HIDDEN, 4 * _SEEN, generator=random_)
    weights["model.connector.modality_projection.proj.weight"] = seen.to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"))
    vision = {
        "hidden_size": _SEEN,
        "intermediate_size": _SEEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": _PIXELS, "patch_size": _PATCH}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "torch_dtype": "bfloat16",
    }
    config |= {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    special = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>"]
    words = [f"w{number}" for number in range(VOCABULARY - len(special))] + special
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
        "pad_token": "w2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    edge = {"longest_edge": _PIXELS}
    sight = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": edge,
        "max_image_size": edge,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(sight))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": patches // 4})
    )
    return folder


def picture(seed: int) -> Any:
    """An image for it."""
    from PIL import Image

    return Image.frombytes("RGB", (_PIXELS, _PIXELS), random.Random(seed).randbytes(3 * _PIXELS**2))
