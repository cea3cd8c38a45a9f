"""What runs in vLLM's workers: dummy weights are scaled, an indexer of DeepSeek V3.2 and V4 chooses
without chance, and KV of single layers is flipped.

In a module of its own, since vLLM hands functions to its workers by name."""

from __future__ import annotations

from typing import Any

import torch

from vcache_backend.prove.model import EXPONENT, MASK, STEP, our_half


def choose_alike(model: Any) -> None:
    """In vLLM's worker: an indexer (DeepSeek V3.2 and V4) chooses by `choose`. Its kernels' threads
    race for the order, in which attention adds up, and for the last place if two scores are
    equal."""
    if not any(type(module).__name__ == "SparseAttnIndexer" for module in model.modules()):
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    def prefill(
        scores: Any, starts: Any, ends: Any, chosen: Any, rows: int, _: int, __: int, count: int
    ) -> None:
        choose(scores[:rows], starts[:rows], ends[:rows], chosen[:rows, :count])

    def decode(
        top: Any, scores: Any, lengths: Any, each: int, chosen: Any, count: int, _: int
    ) -> None:
        ends = top._row_ends(lengths, each, len(scores))
        choose(scores, ends.new_zeros(len(ends)), ends, chosen[:, :count])

    _custom_ops.top_k_per_row_prefill = prefill
    SparseIndexerTopk.forward = decode


def scale_weights(model: Any) -> int:
    """In vLLM's worker. Dummy weights are too small for the output to depend on the context: norms
    become 1, matrices 20 times as large, convolutions of a few tokens 1000 times. Biases and sinks
    stay small: of 1 they would drown what the context says. States of gated delta nets forget in a
    thousand tokens, not in two."""
    # On CPUs vLLM has put most matrices where they cannot be scaled: what goes into them is.
    norm = 1.0 if all(parameter.numel() for parameter in model.parameters()) else 20.0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(1000 if "conv." in name and parameter.dim() == 3 else 20)
        elif "norm" in name:
            parameter.data.fill_(norm)
        elif name.endswith("A_log"):
            parameter.data.fill_(-7.0)
    return sum(1 for _ in model.parameters())


def choose(scores: Any, starts: Any, ends: Any, chosen: Any) -> None:
    """Write the places of the highest scores within [start, end) of each row, from `start` on and
    in order, to `chosen`, and -1 behind them. Of equal scores the first ones count."""
    places = torch.arange(scores.shape[1], device=scores.device)
    outside = (places < starts[:, None]) | (places >= ends[:, None])
    order = scores.masked_fill(outside, -torch.inf).sort(descending=True, stable=True).indices
    order = order[:, : chosen.shape[1]]
    none = order.new_tensor(scores.shape[1])
    places = order.where(~outside.gather(1, order), none).sort().values
    chosen.fill_(-1)
    chosen[:, : order.shape[1]] = (places - starts[:, None]).where(places < none, -1)


def flip_layers(worker: Any, ends: str) -> None:
    """`prove.model.flip_kv` in place, of the layers whose names end so: only in blocks that are
    published as these layers', since block tables share memory."""
    half = our_half()
    published = half.in_place.publisher._published
    layers = worker.vllm_config.compilation_config.static_forward_context
    groups = [one for one in half._kv_config.kv_cache_groups if one.kv_cache_spec.prefix_cacheable]
    for number, group in enumerate(groups):
        blocks = ((published["generation"] > 0) & (published["table"] == number)).nonzero()[0]
        for name in filter(lambda name: name.endswith(ends), group.layer_names):
            cache = layers[name].kv_cache
            page = cache[blocks.tolist()]
            page.view(torch.uint8).flatten(1)[:, EXPONENT::STEP] ^= MASK
            cache[blocks.tolist()] = page
    if torch.cuda.is_available():
        torch.cuda.synchronize()
