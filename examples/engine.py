"""Two workers with `VCacheEngine` share KV through a server: each retrieves prompts that the other
one has stored, and checks every byte. `make demo`.

On two GPUs that read each other's memory, otherwise in host memory. The workers have a paged KV
cache and no model: the prompt and the place in it determine a block's content."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

try:
    import torch

    from vcache_backend.children import Child, MetadataServer, answer_commands, environment
    from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
    from vcache_backend.engine import VCacheEngine
    from vcache_backend.errors import SegmentError
    from vcache_backend.transfer.layout import Layout
    from vcache_backend.vram_pool.devices import current_gpu, gpus
except ModuleNotFoundError as absent:
    sys.exit(f"engine.py: this Python has no {absent.name}: pip install '/path/to/vcache[engine]'")
except KeyboardInterrupt:
    sys.exit(130)

PROMPTS, CHUNKS = 8, 8
"""The number of prompts, and of a prompt's chunks. In a further prompt, number `PROMPTS`, a byte is
changed on purpose."""
CHUNK_SIZE, BLOCK_SIZE = 256, 16
BLOCKS = CHUNKS * CHUNK_SIZE // BLOCK_SIZE
"""Blocks of a prompt, and of a worker's cache."""
SECONDS = 300.0
"""A worker's answer may take so long: importing torch can take a minute."""


def main() -> int:
    """Exit code 0 if every byte was right and the changed byte was found. Ctrl-C and SIGTERM raise
    KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}")
    total, changed = play(devices)
    whole = PROMPTS * CHUNKS
    print(f"{total['chunks']} of {whole} chunks retrieved, {total['bytes']:,} bytes checked")
    print(f"{total['wrong']} bytes are wrong; changed on purpose: 1, found: {changed}")
    right = (total["chunks"], total["wrong"], changed) == (whole, 0, 1)
    print("Every byte is right, and a wrong one is found." if right else "FAILED")
    return 0 if right else 1


def choose_devices() -> list[str]:
    """Two GPUs that can read each other's memory, or host memory twice."""
    with suppress(SegmentError):
        for gpu, peer in combinations(gpus(), 2):
            linked = "none" not in (gpu.links[peer.uuid], peer.links[gpu.uuid])
            if linked and gpu.shares_memory and peer.shares_memory and current_gpu() is not None:
                return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(devices: list[str]) -> tuple[Counter[str], int]:
    """Let each worker store half of the prompts, and the other one retrieve them. Sums of what they
    found, and how many bytes of a further prompt are wrong, of which one is changed on purpose."""
    total, program = Counter[str](), [sys.executable, "-P", __file__]
    with ExitStack() as undo:
        # A socket's path has at most 107 bytes.
        parent = None if len(gettempdir()) < 70 else "/tmp"
        made = undo.enter_context(TemporaryDirectory(prefix="vcache-demo-", dir=parent))
        folder, given = Path(made), environment()
        server = MetadataServer(folder / "vcache.sock", folder / "server.log", given)
        undo.enter_context(server)
        workers = list[Child]()
        for number, device in enumerate(devices):
            command = [*program, str(server.path), device, str(number)]
            worker = Child(f"worker {number}", command, folder / f"{number}.log", given)
            workers.append(undo.enter_context(worker))
        for worker in workers:
            worker.answer(SECONDS)  # it is ready
        for prompt in range(PROMPTS):
            workers[prompt % 2].ask("store", SECONDS, number=prompt)
            total.update(workers[1 - prompt % 2].ask("retrieve", SECONDS, number=prompt))
        workers[0].ask("store", SECONDS, number=PROMPTS)
        return total, workers[1].ask("retrieve", SECONDS, number=PROMPTS)["wrong"]


class Worker:
    """A worker's KV cache and engine. Unwritten blocks hold a byte that only this worker uses. The
    methods answer the commands of the same names."""

    def __init__(self, socket: str, device: str, number: int) -> None:
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
    if len(sys.argv) == 4:
        answer_commands(lambda: Worker(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    else:
        ArgumentParser(description=__doc__).parse_args()
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
