"""`vcache demo`: a real metadata server and two real workers. Each worker retrieves what the other
has stored, and every byte is checked.

A worker has a paged KV cache and an engine, but no model. The content of a block follows from its
prompt, layer and position, so each worker knows what it must retrieve. All other blocks hold a byte
that only this worker uses, so the check also finds bytes that went to a wrong place."""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.server import Server
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.devices import gpus, resolve
from vcache_backend.vram_pool.segment import map_segment

PROMPTS, CHUNKS, CHUNK_SIZE, BLOCK_SIZE = 8, 8, 256, 16
TOKENS = CHUNKS * CHUNK_SIZE + BLOCK_SIZE // 2
"""Of a prompt: whole chunks and half a block, which is not stored."""
BLOCKS = -(-TOKENS // BLOCK_SIZE)
SHAPES = {"host": (4, 2, 64), "cuda": (16, 8, 64)}
"""Layers, KV heads, size of a head. On GPUs those of Llama-3.2-1B."""
START_SECONDS = 300.0
"""The most that the start of a child may take: importing torch can take a minute."""
SECONDS = 60.0
"""The most that an answer of a child that has started may take."""
CLIENT = ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0)
FOLDER = None if len(tempfile.gettempdir()) < 70 else "/tmp"
"""Where the socket's folder is made. A socket's path has at most 107 bytes."""
NEXT = "Next: `vcache doctor`, then connect vLLM: docs/vllm/start.md or docs/lmcache.md"


def run(as_json: bool = False) -> int:
    """Run the demo and print its result. Returns the exit code: 0 if every byte was right and the
    changed byte was found, else 1.

    Leaves no process and no file behind, even on Ctrl-C. Raises VCacheError if it cannot run."""
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}", file=sys.stderr)
    result = play(devices)
    ok, nbytes, checked = result["ok"], result["chunk_bytes"], ByteSize(result["bytes_checked"])
    if as_json:
        print(json.dumps(result, indent=2))
        return 0 if ok else 1
    speed = f"{result['chunks_retrieved']} chunks, {checked.about}, {result['gb_per_s']:.2f} GB/s"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("workers", " and ".join(devices))
    table.add_row("stored", f"{result['chunks_stored']} chunks of {ByteSize(nbytes).about}")
    table.add_row("retrieved by the other worker", speed)
    table.add_row("wrong bytes", f"{result['wrong_bytes']:,} of {checked:,}")
    table.add_row("one byte changed on purpose", "found" if result["control"] else "NOT FOUND")
    verdict = "[green]Every byte is right, and a wrong one is found." if ok else "[red]FAILED"
    Console().print(table, f"{verdict}[/]\n{NEXT}")
    return 0 if ok else 1


def choose_devices() -> list[str]:
    """Two GPUs that can read each other's memory, else host memory twice."""
    try:
        sharing = [gpu for gpu in gpus() if gpu.shares_memory] if torch.cuda.is_available() else []
    except SegmentError:
        sharing = []
    for gpu in sharing:
        for peer in sharing:
            if "none" not in (gpu.links.get(peer.uuid, "none"), peer.links.get(gpu.uuid, "none")):
                return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(devices: list[str]) -> dict[str, Any]:
    """Have each worker store half of the prompts, and the other worker retrieve them. Then change
    one byte in the pool: the check must find it. Returns the fields of `--json`.

    Raises VCacheError if a process fails."""
    answers = []
    with ExitStack() as undo:
        made = tempfile.TemporaryDirectory(prefix="vcache-demo-", dir=FOLDER)
        folder = undo.enter_context(made)
        undo.enter_context(Child("serve", f"{folder}/vcache.sock")).answer(START_SECONDS)
        workers = [
            undo.enter_context(Child("work", f"{folder}/vcache.sock", device, str(number)))
            for number, device in enumerate(devices)
        ]
        for worker in workers:
            worker.answer(START_SECONDS)
        for prompt in range(PROMPTS):
            workers[prompt % 2].ask("store", prompt)
            answers.append(workers[1 - prompt % 2].ask("retrieve", prompt))
        workers[0].ask("damage", 0)
        control = workers[1].ask("retrieve", 0)["wrong"]
    chunks, wrong, seconds = (
        sum(answer[name] for answer in answers) for name in ("chunks", "wrong", "seconds")
    )
    return {
        "ok": chunks == PROMPTS * CHUNKS and wrong == 0 and control == 1,
        "devices": devices,
        "chunks_stored": PROMPTS * CHUNKS,
        "chunks_retrieved": chunks,
        "chunk_bytes": chunk_bytes(devices[0]),
        "bytes_checked": chunks * chunk_bytes(devices[0]),
        "wrong_bytes": wrong,
        "control": control == 1,
        "gb_per_s": chunks * chunk_bytes(devices[0]) / seconds / 1e9,
    }


def chunk_bytes(device: str) -> int:
    """Bytes of a chunk's KV: K and V, bf16, all layers."""
    return CHUNK_SIZE * 2 * 2 * math.prod(SHAPES[device[:4]])


class Child(subprocess.Popen[bytes]):
    """A process of the demo, killed when the block ends, out of reach of Ctrl-C."""

    def __init__(self, *arguments: str) -> None:
        self.words, pipe = " ".join(arguments), subprocess.PIPE
        command = [sys.executable, "-m", "vcache_backend.demo", *arguments]
        super().__init__(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)

    def ask(self, verb: str, prompt: int) -> Any:
        """Have a worker do `verb`, a method of `Worker`. Returns its answer. Raises VCacheError."""
        assert self.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `answer` says so
            self.stdin.write(json.dumps([verb, prompt]).encode() + b"\n")
        return self.answer()

    def answer(self, seconds: float = SECONDS) -> Any:
        """Wait for the next line that the process prints. Raises VCacheError."""
        assert self.stdout is not None
        if not select.select([self.stdout], [], [], seconds)[0]:
            raise VCacheError(f"no answer in {seconds:g} s: {self.words}")
        if not (line := self.stdout.readline()):
            raise VCacheError(f"ended with {self.wait()}, for the reason above: {self.words}")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__(None, None, None)


# ---- in the children


class Worker:
    """A worker's KV cache and engine. Its methods answer the commands of the same names."""

    def __init__(self, socket: str, device: str, number: int) -> None:
        self.device = torch.device(device if device.startswith("cuda") else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        layers, heads, head_dim = SHAPES[device[:4]]
        shape = (layers, 2, 2 * BLOCKS, BLOCK_SIZE, heads, head_dim)
        self.number, self.unused = number, 160 + number
        self.kv = list(torch.empty(shape, dtype=torch.bfloat16, device=self.device))
        self.rows = [layer.view(torch.uint8).flatten(2) for layer in self.kv]
        layout = Layout.of(self.kv, BLOCK_SIZE, model="vcache-demo", chunk_size=CHUNK_SIZE)
        nbytes = ByteSize(PROMPTS * CHUNKS * chunk_bytes(device))
        pool = PoolConfig(device=device, segment_bytes=nbytes)
        self.config = Config(server=ServerConfig(socket=socket), client=CLIENT, pool=pool)
        self.engine = VCacheEngine(self.config, layout)

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
        """Write the prompt's KV, as a model would, and store it."""
        tokens, blocks, slots = self.prompt(prompt)
        for layer, rows in enumerate(self.rows):
            rows.copy_(self.content(prompt, layer, blocks))
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

    def damage(self, prompt: int) -> bool:
        """Invert one byte in the pool, in the middle of the prompt's first chunk."""
        key = self.engine.keys(self.prompt(prompt)[0])[0]
        path, reader = self.config.server.path, resolve(self.config.pool.device)
        with Client(path, CLIENT, reader.name, reader.medium, reconnect=False) as client:
            place = client.acquire([key]).locations[0]
            info, fd = client.open_segment(place.segment)
            with os.fdopen(fd), map_segment(info, fd, reader) as segment:
                segment.tensor(place.offset + place.length // 2, 1).bitwise_not_()
        return True


def say(answer: object) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main(role: str, socket: str, device: str = "", number: str = "") -> None:
    """Run a child. It says `true` once it is ready, and then answers each command."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end if the demo is killed
    if role == "serve":
        server = Server(ServerConfig(socket=socket))
        say(True)
        return server.run()
    torch.set_num_threads(1)
    worker = Worker(socket, device, int(number))
    with worker.engine:
        say(True)
        for line in sys.stdin:
            verb, prompt = json.loads(line)
            say(getattr(worker, verb)(prompt))


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the demo has ended meanwhile
        main(*sys.argv[1:])
