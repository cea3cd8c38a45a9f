"""`vcache demo`: a real metadata server and two real workers. Each worker retrieves prompts that
the other worker has stored, and checks every byte.

The workers, `python -m vcache_backend.demo`, import torch, which takes seconds; the command does
only with two linked GPUs."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from vcache_backend.children import (
    Child,
    ChildFailed,
    MetadataServer,
    answer_commands,
    environment,
    module,
)
from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.tables import print_json
from vcache_backend.vram_pool.devices import current_gpu, gpus

if TYPE_CHECKING:
    import torch

PROMPTS, CHUNKS = 8, 8
"""The number of prompts, and of a prompt's chunks. In a further prompt, number `PROMPTS`, a byte is
changed on purpose."""
CHUNK_SIZE, BLOCK_SIZE = 256, 16
BLOCKS = CHUNKS * CHUNK_SIZE // BLOCK_SIZE
"""Blocks of a prompt, and of a worker's cache."""
SECONDS = 300.0
"""The deadline of a worker's answer: importing torch can take a minute."""


def run(as_json: bool = False) -> int:
    """Run the demo and print the result. Returns the exit code: 0 if every byte was right and the
    changed byte was found, otherwise 1.

    Leaves no process behind, even if killed. Raises VCacheError if the demo cannot run."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")  # before the server starts
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}", file=sys.stderr)
    result = play(devices)
    if as_json:
        print_json(result)
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):18}  {value}")
        print("Every byte is right, and a wrong one is found." if result["ok"] else "FAILED")
        print("Next: `vcache doctor`, then connect vLLM: docs/vllm/start.md in vcache's repository")
    return 0 if result["ok"] else 1


def choose_devices() -> list[str]:
    """Two GPUs that can read each other's memory, or host memory twice."""
    with suppress(SegmentError):
        for gpu, peer in combinations(gpus(), 2):
            linked = "none" not in (gpu.links[peer.uuid], peer.links[gpu.uuid])
            if linked and gpu.shares_memory and peer.shares_memory and current_gpu() is not None:
                return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(devices: list[str]) -> dict[str, Any]:
    """Let each worker store half of the prompts, and the other worker retrieve them. The check must
    find the changed byte of another prompt. Returns the fields of `--json`.

    Raises VCacheError if a worker fails."""
    total: Counter[str] = Counter()
    with ExitStack() as undo:
        # A socket's path has at most 107 bytes.
        parent = None if len(gettempdir()) < 70 else "/tmp"
        made = undo.enter_context(TemporaryDirectory(prefix="vcache-demo-", dir=parent))
        folder, given = Path(made), environment()
        server = MetadataServer(folder / "vcache.sock", folder / "server.log", given)
        undo.enter_context(server)
        workers = [
            undo.enter_context(Child(f"worker {number}", command, folder / f"{number}.log", given))
            for number, device in enumerate(devices)
            for command in [module(__name__, str(server.path), device, str(number))]
        ]
        try:
            control = _exchange(workers, total)
        except ChildFailed as error:
            raise VCacheError(error.line) from error
    return {
        "ok": total["chunks"] == PROMPTS * CHUNKS and total["wrong"] == 0 and control == 1,
        "devices": devices,
        "chunks_stored": PROMPTS * CHUNKS,
        "chunks_retrieved": total["chunks"],
        "bytes_checked": total["bytes"],
        "wrong_bytes": total["wrong"],
        "changed_byte_found": control == 1,
    }


def _exchange(workers: list[Child], total: Counter[str]) -> int:
    """Exchange all prompts, and add up in `total`. How many bytes of the changed one are wrong."""
    for worker in workers:
        worker.answer(SECONDS)  # it is ready
    for prompt in range(PROMPTS):
        workers[prompt % 2].ask("store", SECONDS, number=prompt)
        total.update(workers[1 - prompt % 2].ask("retrieve", SECONDS, number=prompt))
    workers[0].ask("store", SECONDS, number=PROMPTS)
    return int(workers[1].ask("retrieve", SECONDS, number=PROMPTS)["wrong"])


class Worker:
    """A worker has a paged KV cache and an engine, but no model. The prompt and the place in the
    prompt determine a block's content, so each worker knows the right bytes. Unwritten blocks hold
    a byte that only this worker uses. The methods answer the commands of the same names."""

    def __init__(self, socket: str, device: str, number: int) -> None:
        import torch

        from vcache_backend.engine import VCacheEngine
        from vcache_backend.transfer.layout import Layout

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
        server = ServerConfig(socket=socket)
        client = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)
        pool = PoolConfig(device=device, segment_bytes=ByteSize(PROMPTS * kv.nbytes))
        layout = Layout.of(self.kv, BLOCK_SIZE, model="vcache-demo", chunk_size=CHUNK_SIZE)
        self.engine = VCacheEngine(Config(server=server, client=client, pool=pool), layout)
        self.engine.register(self.kv)

    def prompt(self, number: int, blocks: int = BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt's tokens, and the content of a cache that holds the first `blocks` blocks."""
        import torch

        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(128_000, self.slots.shape, generator=generator)
        content = torch.randint(256, self.rows.shape, dtype=torch.uint8, generator=generator)
        rows = torch.full_like(self.rows, self.unused)
        rows[:, :, self.blocks[:blocks]] = content[:, :, :blocks].to(rows.device)
        return tokens, rows

    def store(self, number: int) -> bool:
        """Write a prompt's KV, as a model would, and store it."""
        tokens, rows = self.prompt(number)
        self.rows.copy_(rows)
        if number == PROMPTS:
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


if __name__ == "__main__":
    answer_commands(lambda: Worker(sys.argv[1], sys.argv[2], int(sys.argv[3])))
