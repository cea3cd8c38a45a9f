"""What a lossy codec does to a model's answers: its KV cache of a prompt goes through the codec, then the same tokens are scored.

By default a small Llama with random weights, whose logprobs depend on every token of the prompt; another by its path. The answer is
the greedy one of the untouched cache, and both caches score all of it in one forward pass of the same shape, so that what differs
comes from the codec alone: a lossless one differs by nothing, which is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

from vcache_backend.offload.codecs import Codec, Geometry, make

PROMPTS = 8
PROMPT_TOKENS = 256
ANSWER_TOKENS = 32
TOP = 5


class Difference(NamedTuple):
    """Of log-probabilities, absolute, over the `TOP` likeliest tokens of each place; and how many greedy tokens stay the same."""

    largest: float
    mean: float
    same_tokens: float


def differences(names: Sequence[str], path: str = "") -> dict[str, Difference]:
    """For each codec, over `PROMPTS` prompts of random tokens (a tokenizer is not needed)."""
    model = _loaded(path) if path else _random()
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    codecs = [make(name, Geometry("bfloat16", head_dim)) for name in names]
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
    for seed in range(PROMPTS):
        prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
        answer = _greedy(model, prompt)
        reference = _scores(model, prompt, answer, None)
        top = reference.topk(TOP).indices
        for codec in codecs:
            scores = _scores(model, prompt, answer, codec)
            if codec.lossless and not torch.equal(scores, reference):
                raise AssertionError(f"{codec.name} is lossless, and changed logprobs")
            found[codec.name].append(((scores - reference).gather(1, top).abs(), scores.argmax(1) == reference.argmax(1)))
    result = {}
    for name, pairs in found.items():
        apart, same = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
        result[name] = Difference(float(apart.max()), float(apart.mean()), float(same.float().mean()))
    return result


@torch.no_grad()
def _greedy(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    answer = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0
    )
    return torch.as_tensor(answer[:, prompt.shape[1] :])


@torch.no_grad()
def _scores(model: Any, prompt: torch.Tensor, answer: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """Log-probabilities of what follows each token of the answer, from a cache of the prompt that went through the codec."""
    cache = model(prompt, use_cache=True).past_key_values
    if codec is not None:
        for layer in cache.layers:
            layer.keys, layer.values = _through(codec, layer.keys), _through(codec, layer.values)
    logits = model(answer, past_key_values=cache, use_cache=True).logits
    return torch.as_tensor(logits[0].double().log_softmax(-1))


def _through(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """Of shape (1, heads, tokens, head_dim), as it is; in a chunk a token's heads lie beside each other."""
    there = kv.transpose(1, 2).contiguous()
    chunk = there.view(-1).view(torch.uint8)
    payload, back = torch.empty(codec.bound(chunk.numel()), dtype=torch.uint8), torch.empty_like(chunk)
    codec.decode(payload[: codec.encode(chunk, payload)], back)
    return back.view(kv.dtype).view(there.shape).transpose(1, 2).contiguous()


def _loaded(path: str) -> Any:
    transformers: Any = import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def _random() -> Any:
    """Gains above 1 make attention and its values matter, so that a change of the cache is seen."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    gains = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 4.0, "o_proj": 4.0, "lm_head": 3.0}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                gain = 16.0 if "embed" in name else gains.get(name.split(".")[-2], 1.0)
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain / weight.shape[1] ** 0.5)
    return model.to(torch.bfloat16).eval()
