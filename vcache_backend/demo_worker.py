"""A worker of `vcache demo`: it stores and retrieves prompts as the demo tells it to.

It has a paged KV cache and an engine, but no model. The content of a block follows from its prompt,
layer and position, so each worker knows what it must retrieve. All other blocks hold a byte that
only this worker uses, so the check also finds bytes that went to a wrong place."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
from vcache_backend.demo import CHUNKS, DAMAGED, PROMPTS, SECONDS, SOCKET
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout

CHUNK_SIZE, BLOCK_SIZE = 256, 16
TOKENS = CHUNKS * CHUNK_SIZE + BLOCK_SIZE // 2
"""Of a prompt: whole chunks and half a block, which is not stored."""
BLOCKS = -(-TOKENS // BLOCK_SIZE)
SHAPES = {"cpu": (4, 2, 64), "cuda": (16, 8, 64)}
"""Layers, KV heads, size of a head. On GPUs those of Llama-3.2-1B."""
CLIENT = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)


class Worker:
    """A worker's KV cache and engine. Its methods answer the commands of the same names."""

    def __init__(self, folder: str, device: str, number: int) -> None:
        torch.set_num_threads(1)
        self.device = torch.device(device if device.startswith("cuda") else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        layers, heads, head_dim = SHAPES[self.device.type]
        shape = (layers, 2, 2 * BLOCKS, BLOCK_SIZE, heads, head_dim)
        self.number, self.unused = number, 160 + number
        self.kv = list(torch.empty(shape, dtype=torch.bfloat16, device=self.device))
        self.rows = [layer.view(torch.uint8).flatten(2) for layer in self.kv]
        self.chunk_bytes = sum(rows[:, 0].numel() for rows in self.rows) * CHUNK_SIZE // BLOCK_SIZE
        layout = Layout.of(self.kv, BLOCK_SIZE, model="vcache-demo", chunk_size=CHUNK_SIZE)
        nbytes = ByteSize(PROMPTS * CHUNKS * self.chunk_bytes)
        server = ServerConfig(socket=f"{folder}/{SOCKET}")
        pool = PoolConfig(device=device, segment_bytes=nbytes)
        self.engine = VCacheEngine(Config(server=server, client=CLIENT, pool=pool), layout)

    def prompt(self, number: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """A prompt's tokens, its blocks in this worker's cache, and its slot mapping."""
        tokens = np.random.default_rng(number).integers(0, 128_000, TOKENS)
        blocks = np.random.default_rng([number, self.number]).permutation(2 * BLOCKS)[:BLOCKS]
        slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).flatten()[:TOKENS]
        return tokens, torch.from_numpy(blocks).to(self.device), torch.from_numpy(slots)

    def content(self, prompt: int, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A layer in which `blocks` hold the prompt's beginning and all others are unused."""
        rows = torch.full_like(self.rows[layer], self.unused)
        drawn = np.random.default_rng([prompt, layer]).bytes(BLOCKS * rows[:, 0].numel())
        prompt_rows = torch.frombuffer(bytearray(drawn), dtype=torch.uint8).view(2, BLOCKS, -1)
        rows[:, blocks] = prompt_rows[:, : len(blocks)].to(self.device)
        return rows

    def store(self, prompt: int) -> bool:
        """Write the prompt's KV, as a model would, and store it. Change one byte of `DAMAGED`."""
        tokens, blocks, slots = self.prompt(prompt)
        for layer, rows in enumerate(self.rows):
            rows.copy_(self.content(prompt, layer, blocks))
        if prompt == DAMAGED:
            self.rows[0][0, blocks[0], 0] ^= 1
        self.engine.store(tokens, None, self.kv, slots)
        return self.engine.flush(SECONDS / 2)

    def retrieve(self, prompt: int) -> dict[str, float]:
        """Retrieve the prompt into unused blocks, and check every byte of the whole cache."""
        tokens, blocks, slots = self.prompt(prompt)
        for rows in self.rows:
            rows.fill_(self.unused)
        started = time.perf_counter()
        retrieved = int(self.engine.retrieve(tokens, None, self.kv, slots).sum())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, blocks = time.perf_counter() - started, blocks[: retrieved // BLOCK_SIZE]
        wrong = sum(
            int((rows != self.content(prompt, layer, blocks)).sum())
            for layer, rows in enumerate(self.rows)
        )
        return {"chunks": retrieved // CHUNK_SIZE, "wrong": wrong, "seconds": seconds}


def main(fd: str, folder: str, device: str, number: str) -> None:
    """Say a chunk's bytes once the worker is ready, and then answer each command. The end of the
    demo ends it; a demo that was killed has left its folder."""
    worker = Worker(folder, device, int(number))
    with worker.engine, Connection(int(fd)) as pipe, suppress(EOFError, OSError):
        pipe.send(worker.chunk_bytes)
        while True:
            verb, prompt = pipe.recv()
            pipe.send(getattr(worker, verb)(prompt))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
