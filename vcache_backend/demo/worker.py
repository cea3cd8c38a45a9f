"""A worker of `vcache demo`: stores and retrieves prompts on the demo's commands.

A worker has a paged KV cache and an engine, but no model. The prompt and the place in the prompt
determine a block's content, so each worker knows the right bytes. Unwritten blocks hold a byte that
only this worker uses."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
from vcache_backend.demo import CHUNKS, DAMAGED, PROMPTS, SECONDS, SOCKET
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout

CHUNK_SIZE, BLOCK_SIZE = 256, 16
BLOCKS = CHUNKS * CHUNK_SIZE // BLOCK_SIZE
"""Blocks of a prompt, and of a worker's cache."""
CLIENT = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)


class Worker:
    """A worker's KV cache and engine. The methods answer the commands of the same names."""

    def __init__(self, folder: str, device: str, number: int) -> None:
        torch.manual_seed(number)
        cuda = device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(device)
        # The shape of Llama-3.2-1B, on the CPU with two layers only.
        shape = (16 if cuda else 2, 2, BLOCKS, BLOCK_SIZE, 8, 64)
        kv = torch.empty(shape, dtype=torch.bfloat16, device=device if cuda else "cpu")
        self.kv = list(kv)
        self.rows = kv.view(torch.uint8).flatten(3)
        self.blocks = torch.randperm(BLOCKS)
        self.slots = (self.blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        self.unused = 160 + number
        server = ServerConfig(socket=f"{folder}/{SOCKET}")
        pool = PoolConfig(device=device, segment_bytes=ByteSize(PROMPTS * kv.nbytes))
        layout = Layout.of(self.kv, BLOCK_SIZE, model="vcache-demo", chunk_size=CHUNK_SIZE)
        self.engine = VCacheEngine(Config(server=server, client=CLIENT, pool=pool), layout)
        self.engine.register(self.kv)

    def prompt(self, number: int, blocks: int = BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt's tokens, and the content of a cache that holds the first `blocks` blocks."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(128_000, self.slots.shape, generator=generator)
        content = torch.randint(256, self.rows.shape, dtype=torch.uint8, generator=generator)
        rows = torch.full_like(self.rows, self.unused)
        rows[:, :, self.blocks[:blocks]] = content[:, :, :blocks].to(rows.device)
        return tokens, rows

    def store(self, number: int) -> bool:
        """Write a prompt's KV, as a model would, and store it. Change one byte of `DAMAGED`."""
        tokens, rows = self.prompt(number)
        self.rows.copy_(rows)
        if number == DAMAGED:
            self.rows[0, 0, self.blocks[0], 0] ^= 1
        self.engine.store(tokens, None, self.kv, self.slots)
        return self.engine.flush(SECONDS / 2)

    def retrieve(self, number: int) -> dict[str, int]:
        """Retrieve a prompt into unused blocks, and check every byte of the whole cache."""
        tokens, _ = self.prompt(number)
        self.rows.fill_(self.unused)
        retrieved = int(self.engine.retrieve(tokens, None, self.kv, self.slots).sum())
        chunks = retrieved // CHUNK_SIZE
        _, expected = self.prompt(number, retrieved // BLOCK_SIZE)
        wrong = int((self.rows != expected).sum())
        nbytes = chunks * self.rows.nbytes // CHUNKS
        return {"chunks": chunks, "bytes": nbytes, "wrong": wrong}


def main(folder: str, device: str, number: str) -> None:
    """Answer each command from stdin, a pipe of `multiprocessing`. The worker ends with the demo,
    and removes the folder that a killed demo leaves."""
    worker = Worker(folder, device, int(number))
    with worker.engine, Connection(sys.stdin.fileno()) as pipe, suppress(EOFError, OSError):
        while True:
            verb, prompt = pipe.recv()
            pipe.send(getattr(worker, verb)(prompt))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
