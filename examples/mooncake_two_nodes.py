"""Two nodes on one machine, with nothing in common but a Mooncake store: what node A stores, node B retrieves.

    python examples/mooncake_two_nodes.py --master 127.0.0.1:50051        # `mooncake_tier.sh --demo` starts a store and does it
    python examples/mooncake_two_nodes.py --master ... --tokens 8192

Each node has a metadata server and a pool of its own, in host memory. A stores the KV of a prompt, which goes below in the background;
B looks it up, retrieves it, and every byte is compared. The second time B has it in its own pool. Exit code 1 if anything is missing
or wrong.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from vcache_backend.config import Config, from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

LAYERS, BLOCK, HEADS, DIM = 8, 16, 8, 128
SECONDS = 20.0


def kv_caches(blocks: int) -> list[torch.Tensor]:
    """Paged KV caches as vLLM has them, of a small model: 32 KiB a token."""
    return [torch.zeros(2, blocks, BLOCK, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]


def configuration(folder: Path, name: str, master: str) -> Config:
    return from_dict(
        {
            "server": {"socket": str(folder / f"{name}.sock")},
            "pool": {"device": "host", "segment_bytes": "512 MiB"},
            "offload": {
                "policy": "write_through",
                "lookup_seconds": 1.0,
                "negative_seconds": 0.1,
                "mooncake": {"master": master},
            },
        }
    )


def node(undo: ExitStack, config: Config, model: str, kvcaches: list[torch.Tensor]) -> VCacheEngine:
    """A metadata server and an engine, whose tier is open when this returns."""
    command = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", config.server.socket]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    undo.callback(server.wait)
    undo.callback(server.terminate)
    wait(lambda: config.server.path.exists(), "the metadata server did not start")
    kv_layout = PagedKV.describe(kvcaches, BLOCK).name
    layout = Layout(
        model=model, dtype="bfloat16", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, kv_layout=kv_layout
    )
    engine = undo.enter_context(VCacheEngine(config, layout))
    engine.register(kvcaches)
    wait(lambda: engine.get_stats()["offload"]["usable"], f"no store at {config.offload.mooncake.master}")
    return engine


def wait(what: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit(f"mooncake_two_nodes: {otherwise}; `vcache doctor` may say why")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--master", default="127.0.0.1:50051", help="HOST:PORT of mooncake_master")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt, a multiple of 256")
    given = parser.parse_args()
    prompt = torch.randint(0, 100_000, (given.tokens,))
    slots = torch.arange(given.tokens)
    a_cache, b_cache = kv_caches(given.tokens // BLOCK), kv_caches(given.tokens // BLOCK)
    for layer in a_cache:
        layer.normal_()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        # A name of its own: the store may have other people's chunks, and this prompt's of last time.
        model = f"demo-{secrets.token_hex(4)}"
        a = node(undo, configuration(Path(folder), "a", given.master), model, a_cache)
        b_config = configuration(Path(folder), "b", given.master)
        b = node(undo, b_config, model, b_cache)
        print(f"node B before: {b.lookup(prompt)} of {given.tokens} tokens")
        a.store(prompt, None, a_cache, slots)
        a.flush(SECONDS, through=True)
        print(f"node A stored them; written below: {a.get_stats()['offload']['written']} chunks")
        # B asked too early: what was absent then it does not ask for again so soon.
        time.sleep(b_config.offload.negative_seconds)
        good = True
        for _ in range(2):
            found = b.lookup(prompt)
            for layer in b_cache:
                layer.zero_()
            came = int(b.retrieve(prompt, None, b_cache, slots).sum())
            equal = all(torch.equal(mine, theirs) for mine, theirs in zip(a_cache, b_cache, strict=True))
            verdict = "equal" if equal else "WRONG"
            print(f"node B: {found} tokens found, {came} came, {verdict}; chunks so far: {b.get_stats()['hits']}")
            good = good and equal and came == given.tokens
            b.flush(SECONDS)
        dropped = {cause: count for cause, count in a.get_stats()["offload"]["dropped"].items() if count}
        if dropped:
            print(f"chunks that were not written: {dropped}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
