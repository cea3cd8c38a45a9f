"""`vcache demo`: a real metadata server and two real workers. Each retrieves what the other stored,
and every byte is checked.
"""

from __future__ import annotations

import sys

import msgspec
import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vcache_backend.config import ByteSize, Config
from vcache_backend.demo.content import Shape
from vcache_backend.demo.workers import CHUNKS, workers
from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.vram_pool.devices import gpus

HOST_SHAPE = Shape(layers=4, kv_heads=2, head_dim=64)
"""2 KiB a token: little enough for two slow cores."""
GPU_SHAPE = Shape(layers=16, kv_heads=8, head_dim=64)
"""That of Llama-3.2-1B: 32 KiB a token."""
PROMPTS = 8
NEXT = "Next: `vcache doctor`, then connect vLLM: docs/vllm/start.md or docs/lmcache.md"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result: the fields of `--json`. chunk_bytes: of one chunk, all layers. control: the
    faults that the check found after one byte was changed on purpose; empty if it found none."""

    ok: bool
    devices: list[str]
    chunks_stored: int
    chunks_retrieved: int
    chunk_bytes: int
    bytes_checked: int
    wrong_bytes: int
    gb_per_s: float
    control: str
    problems: list[str]


def run(config: Config, as_json: bool = False) -> int:
    """Run the demo and print its result. Returns the exit code: 0 if every byte was right and the
    changed one was found, else 1.

    Uses only `engine.chunk_size` and `pool.max_ctas` of `config`. Leaves no process and no file
    behind, even on Ctrl-C. Raises VCacheError if it cannot run."""
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}", file=sys.stderr)
    summary = play(config, devices)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        Console().print(render(summary))
    return 0 if summary.ok else 1


def choose_devices() -> list[str]:
    """The devices of the two workers: two GPUs that can read each other's memory, else host memory
    twice.
    """
    try:
        found = [gpu for gpu in gpus() if gpu.shares_memory] if torch.cuda.is_available() else []
    except SegmentError:
        found = []
    for gpu in found:
        for peer in found:
            if "none" not in (gpu.links.get(peer.uuid, "none"), peer.links.get(gpu.uuid, "none")):
                return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(config: Config, devices: list[str]) -> Summary:
    """Have each worker store half of the prompts and the other one retrieve them. Then change one
    byte in the pool: the check must find it.

    Raises ConfigError if a chunk is not a whole number of blocks, and VCacheError if a process
    fails."""
    shape = GPU_SHAPE if devices[0].startswith("cuda") else HOST_SHAPE
    size = config.engine.chunk_size
    if size % shape.block_size:
        raise ConfigError(
            f"engine.chunk_size: {size} is not a multiple of the demo's block size, {shape.block_size}"
        )
    problems, chunks, wrong, seconds = list[str](), 0, 0, 0.0
    with workers(config, devices, shape, PROMPTS * CHUNKS * size * shape.token_bytes) as both:
        for prompt in range(PROMPTS):
            writer, reader = both[prompt % 2], both[1 - prompt % 2]
            writer.ask("store", prompt)
            done = reader.ask("retrieve", prompt)
            problems += [f"prompt {prompt}, {reader.name}: {fault}" for fault in done.faults]
            chunks, seconds = chunks + done.chunks, seconds + done.seconds
            wrong += sum(fault.nbytes for fault in done.faults)
        both[0].ask("damage", 0)
        control = both[1].ask("retrieve", 0).faults
    if [(fault.kind, fault.nbytes) for fault in control] != [("wrong", 1)]:
        problems.append(
            f"control: one byte was changed in the pool; the check found {'; '.join(map(str, control)) or 'nothing'}"
        )
    if chunks != PROMPTS * CHUNKS:
        problems.append(f"{chunks} chunks were retrieved of {PROMPTS * CHUNKS}")
    nbytes = chunks * size * shape.token_bytes
    return Summary(
        ok=not problems,
        devices=devices,
        chunks_stored=PROMPTS * CHUNKS,
        chunks_retrieved=chunks,
        chunk_bytes=size * shape.token_bytes,
        bytes_checked=nbytes,
        wrong_bytes=wrong,
        gb_per_s=nbytes / seconds / 1e9,
        control=", ".join(map(str, control)),
        problems=problems,
    )


def render(summary: Summary) -> RenderableType:
    """The result for people: a table, then the problems, and what to do next."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    checked = f"{summary.chunks_retrieved} chunks, {ByteSize(summary.bytes_checked).about}, {summary.gb_per_s:.2f} GB/s"
    table.add_row("workers", " and ".join(summary.devices))
    table.add_row(
        "stored", f"{summary.chunks_stored} chunks of {ByteSize(summary.chunk_bytes).about}"
    )
    table.add_row("retrieved by the other worker", checked)
    table.add_row("wrong bytes", f"{summary.wrong_bytes:,} of {summary.bytes_checked:,}")
    table.add_row(
        "one byte changed on purpose",
        f"found: {summary.control}" if summary.control else "NOT FOUND",
    )
    problems = [Text(problem, style="red") for problem in summary.problems]
    verdict = [Text("Every byte is right, and a wrong one is found.", style="green")]
    return Group(table, *(problems or verdict), NEXT)
