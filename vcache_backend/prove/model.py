"""A model without a download: its folder, and weights whose output depends on every token. And what
runs in the workers of vLLM, which finds it by this module's name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

TINY_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TINY_LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_LLAMA |= {"head_dim": 64, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 1024}
TINY_LLAMA |= {"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 4096}
TINY_LLAMA["torch_dtype"] = "bfloat16"
"""A `config.json`. Its KV takes 1 KiB a token."""
MASK, EXPONENT, STEP = 0x01, 3, 64
"""What `flip_kv` changes: of a page every 64th byte, from the fourth on; in bfloat16 and in float32
it is an exponent's."""


def flip_kv(
    worker: Any, offset: int = EXPONENT, step: int = STEP, layers: int | None = None
) -> None:
    """In vLLM's worker, with our connector: change byte `offset` of every block's page, and every
    `step` bytes further. layers: so many, the first ones. Once more, and all is as before."""
    import torch

    kv = our_half()._worker.kv
    for page in [page for kind in kv.kinds for page in kind.pages][:layers]:
        page[:, offset::step] ^= MASK
    if kv.device.type == "cuda":
        torch.cuda.synchronize(kv.device)


def flush_kv(worker: Any, seconds: float) -> bool:
    """In vLLM's worker, with our connector: wait until others can find what it has written. Whether
    they can."""
    half = our_half()
    if half is None or half._worker is None:
        return False
    publisher = half.in_place.publisher if half.in_place is not None else None
    told = publisher is None or publisher.outbox.flush(seconds)
    return bool(told and half._worker.session.flush(seconds))


def our_half() -> Any:
    """Our connector's half in this worker, also if it is the first of several connectors."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    return next(iter(getattr(group, "_connectors", (group,))))._worker


def write_model(folder: Path, model: dict[str, Any], weights: bool = True, seed: int = 1) -> Path:
    """A folder that vLLM takes for the model: `config.json`, and the Llama's random weights of this
    seed. Without `weights` they are vLLM's dummy ones.

    One that is there stays as it is: vcache knows a model by its files, and when they were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, tensors, text = folder / "config.json", folder / "model.safetensors", json.dumps(model)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
        tensors.unlink(missing_ok=True)
    if weights and not tensors.exists():
        _write_weights(tensors, model, seed)
    return folder


def _write_weights(path: Path, model: dict[str, Any], seed: int) -> None:
    """Random weights, scaled so that attention matters and the output depends on every token."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    random, weights = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    gains = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 4.0, "o_proj": 4.0, "lm_head": 3.0}
    gains["embed_tokens"] = math.sqrt(model["hidden_size"])
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        shapes = build(AutoConfig.for_model(**model))
    for name, parameter in shapes.named_parameters():
        made = torch.ones(parameter.shape)
        if made.dim() > 1:
            gain = gains.get(name.split(".")[-2], 1.0)
            made.normal_(std=gain / math.sqrt(made.shape[1]), generator=random)
        weights[name] = made.to(torch.bfloat16)
    save_file(weights, str(path))
