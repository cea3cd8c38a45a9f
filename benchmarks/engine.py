"""A whole `retrieve()` (hashing, lease, plan, copy, release) against a mere copy of its bytes by
the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's device; the second one
retrieves them into blocks that were overwritten before. On GPUs: the Llama-3.1-8B shape, 4,096
tokens, 512 MiB, from a peer. On host memory: a small shape, against a plain copy of the same bytes.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from vcache_backend.config import from_dict
from vcache_backend.engine import VCacheEngine

from .copies import engine_seconds
from .kv import KV, Size, prompt, timed
from .processes import metadata_server
from .results import Row, row

RUNS = 30


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    if torch.cuda.device_count() > 1:
        return [
            _measure(
                "engine_retrieve_4096",
                KV(Size(), 1, "cuda:1"),
                KV(Size(), 2, "cuda:0"),
                at_most=1.15,
            )
        ]
    small = Size(layers=4, heads=2, dim=64)
    return [
        _measure(
            "engine_retrieve_host", KV(small, 1, "host:1"), KV(small, 2, "host:0"), at_most=None
        )
    ]


def _measure(name: str, stored: KV, into: KV, at_most: float | None) -> Row:
    nbytes, tokens = stored.size.nbytes, prompt(stored.size.tokens)
    with (
        metadata_server() as path,
        _engine(path, stored, 2 * nbytes) as writer,
        _engine(path, into, 0) as engine,
    ):
        writer.store(tokens, None, stored.tensors, stored.slots)
        if not writer.flush(30) or engine.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        into.poison()
        if not bool(
            engine.retrieve(tokens, None, into.tensors, into.slots).all()
        ) or not into.holds(stored):
            raise RuntimeError(
                "retrieve() did not bring what was stored; nothing is measured: "
                f"{engine.get_stats()}"
            )
        ours, plain, masks = [], [], list[torch.Tensor]()
        flat = torch.empty(nbytes, dtype=torch.uint8, device=into.tensors[0].device)
        source = torch.empty(nbytes, dtype=torch.uint8, device=stored.tensors[0].device)
        for _ in range(RUNS):
            plain.append(_copy_ms(flat, source))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            ours.append(
                1e3
                * timed(
                    lambda: masks.append(engine.retrieve(tokens, None, into.tensors, into.slots))
                )
            )
        if not all(bool(mask.all()) for mask in masks):
            raise RuntimeError(f"a retrieve() missed: {engine.get_stats()}")
    what = (
        f"{nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one "
        "contiguous copy"
    )
    return row(name, "ms", ours, plain, what=what, at_most=at_most)


def _engine(socket: Path, kv: KV, pool_bytes: int) -> VCacheEngine:
    return VCacheEngine(
        from_dict(
            {
                "server": {"socket": str(socket)},
                "pool": {"device": kv.device, "segment_bytes": pool_bytes},
            }
        ),
        kv.layout,
    )


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    """Milliseconds of one contiguous copy, by CUDA events on a GPU and by the host's clock
    elsewhere.
    """
    if not target.is_cuda:
        return 1e3 * timed(lambda: target.copy_(source))
    with torch.cuda.device(target.device):
        return 1e3 * statistics.median(
            engine_seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)
        )
