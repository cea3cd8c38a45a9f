"""Two nodes on one machine that share only a Mooncake store: what node A stores, node B retrieves.

    vcache mooncake --segment 256MiB &
    python examples/mooncake_two_nodes.py --master 127.0.0.1:50051 [--tokens 8192]

Each node has its own metadata server, and its own pool in host memory. A stores the KV of a prompt,
which goes to the offload tier in the background. B looks it up and retrieves it, and every byte is
compared. The second time B has it in its own pool. Exit code 1 if anything is missing or wrong."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

try:
    import torch
    from serving import metadata_server

    from vcache_backend.config import from_dict
    from vcache_backend.engine import VCacheEngine
    from vcache_backend.transfer.layout import Layout
except ModuleNotFoundError as absent:
    sys.exit(
        f"{Path(sys.argv[0]).name}: this Python has no {absent.name}: pip install "
        "'/path/to/vcache[mooncake]'"
    )

LAYERS, BLOCK, HEADS, DIM = 8, 16, 8, 128
SECONDS = 60.0


def kv_caches(blocks: int) -> list[torch.Tensor]:
    """Paged KV caches as vLLM has them, of a small model: 32 KiB a token."""
    return [torch.zeros(2, blocks, BLOCK, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]


def node(
    undo: ExitStack, socket: Path, master: str, model: str, kvcaches: list[torch.Tensor]
) -> VCacheEngine:
    """A metadata server and an engine, whose tier is open when this returns."""
    undo.enter_context(metadata_server(socket))
    # Patient, since this is to show what is there: a server that computes instead waits for less.
    waits = {"lookup_seconds": SECONDS, "get_seconds": SECONDS}
    offload = {
        "policy": "write_through",
        # Of 1 GiB, the default, all would be touched in each of both nodes.
        "staging_bytes": "256 MiB",
        **waits,
        "mooncake": {"master": master, "rpc_seconds": SECONDS},
    }
    pool = {"device": "host", "segment_bytes": "512 MiB"}
    client = {"connect_seconds": SECONDS, "request_seconds": SECONDS}
    sections = {"client": client, "pool": pool, "offload": offload}
    config = from_dict({"server": {"socket": str(socket)}, **sections})
    engine = undo.enter_context(VCacheEngine(config, Layout.of(kvcaches, BLOCK, model=model)))
    engine.register(kvcaches)
    deadline = time.monotonic() + SECONDS
    while not engine.get_stats()["offload"]["usable"]:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"mooncake_two_nodes: no store at {master}; `vcache doctor` may say why"
            )
        time.sleep(0.02)
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--master", default="127.0.0.1:50051", help="HOST:PORT of mooncake_master")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="length of the prompt, a multiple of 256"
    )
    given = parser.parse_args()
    if given.tokens < 256 or given.tokens % 256:
        parser.error(f"--tokens: a multiple of 256 is needed, not {given.tokens}")
    prompt, slots = torch.randint(0, 100_000, (given.tokens,)), torch.arange(given.tokens)
    a_cache, b_cache = kv_caches(given.tokens // BLOCK), kv_caches(given.tokens // BLOCK)
    for layer in a_cache:
        layer.normal_()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        # A name of its own: the store may have other people's chunks, and this prompt's of last
        # time.
        model = f"demo-{secrets.token_hex(4)}"
        a = node(undo, Path(folder) / "a.sock", given.master, model, a_cache)
        b = node(undo, Path(folder) / "b.sock", given.master, model, b_cache)
        print(f"node B before: {b.lookup(prompt)} of {given.tokens} tokens")
        a.store(prompt, None, a_cache, slots)
        a.flush(SECONDS, through=True)
        print(
            f"node A stored them; in the offload tier: {a.get_stats()['offload']['written']} chunks"
        )
        good = True
        for _ in range(2):
            found = b.lookup(prompt)
            for layer in b_cache:
                layer.zero_()
            came = int(b.retrieve(prompt, None, b_cache, slots).sum())
            equal = all(
                torch.equal(mine, theirs) for mine, theirs in zip(a_cache, b_cache, strict=True)
            )
            good = good and equal and came == given.tokens
            verdict = "equal" if equal else "WRONG"
            print(
                f"node B: {found} tokens found, {came} came, {verdict}; chunks so far: "
                f"{b.get_stats()['hits']}"
            )
            b.flush(SECONDS)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
