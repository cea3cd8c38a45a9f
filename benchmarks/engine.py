"""A whole `retrieve()` (hashing, pin, plan, copy, comparison) against a mere copy of its bytes by
the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's GPU; the second one
retrieves them from there into blocks that were overwritten before: the Llama-3.1-8B shape, 4,096
tokens, 512 MiB. It needs two GPUs.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

import torch

from vcache_backend.config import from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout

from .copies import engine_seconds
from .processes import metadata_server
from .results import Row, row

BLOCK_SIZE = 16
TOKENS, CHUNK_TOKENS, LAYERS = 4096, 256, 32


def run() -> list[Row]:
    """The row `engine_retrieve_4096`."""
    dice = torch.Generator().manual_seed(1)
    blocks, shape = torch.randperm(TOKENS // BLOCK_SIZE, generator=dice), (8, 128)
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)
    size = (2, len(blocks), BLOCK_SIZE, *shape)
    numbers = [torch.randint(0, 255, size, generator=dice) for _ in range(LAYERS)]
    stored = [layer.to("cuda:1", torch.bfloat16) for layer in numbers]
    into = [torch.full_like(layer, float("nan"), device="cuda:0") for layer in stored]
    nbytes = sum(layer.nbytes for layer in stored)
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{n}") for n in (1, 0))
    copy = partial(target.copy_, source, non_blocking=True)
    tokens, ours, plain = torch.arange(TOKENS), list[float](), list[float]()

    def engine(socket: Path, tensors: list[torch.Tensor], lends: int) -> VCacheEngine:
        pool = {"device": str(tensors[0].device), "segment_bytes": lends}
        config = from_dict({"server": {"socket": str(socket)}, "pool": pool})
        layout = Layout.of(tensors, BLOCK_SIZE, model="benchmark", chunk_size=CHUNK_TOKENS)
        return VCacheEngine(config, layout)

    with (
        metadata_server() as path,
        engine(path, stored, 2 * nbytes) as writer,
        engine(path, into, 0) as reader,
    ):
        writer.store(tokens, None, stored, slots)
        if not writer.flush(30) or reader.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        for _ in range(31):
            with torch.cuda.device("cuda:0"):
                copies = [1e3 * engine_seconds(copy) for _ in range(3)]
            plain.append(statistics.median(copies))
            reader.lookup(tokens)  # as vLLM's scheduler does, a moment before
            started = time.perf_counter()
            whole = reader.retrieve(tokens, None, into, slots).all()
            ours.append(1e3 * (time.perf_counter() - started))
            if not whole:
                raise RuntimeError(f"a retrieve() missed: {reader.get_stats()}")
        pairs = [(mine.cpu(), theirs.cpu()) for mine, theirs in zip(into, stored, strict=True)]
        if not all(torch.equal(*pair) for pair in pairs):
            raise RuntimeError(f"retrieve() brought other bytes: {reader.get_stats()}")
    what = f"{nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one copy"
    return [row("engine_retrieve_4096", "ms", ours[1:], plain[1:], what=what, at_most=1.15)]
