"""Two nodes with real vLLM instances, and one Mooncake store behind the pools of both, for
tests.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mooncake_cases import names_in
from mooncake_store import Depot
from processes import eventually
from vllm_cases import CHUNK, QUICK, TOKEN_BYTES, Answer, Instance, Node, Router, new_tokens

CHUNK_BYTES = CHUNK * TOKEN_BYTES
ROOM = 16
"""Chunks that the second node's pool has room for."""
HITS = 4 * CHUNK
BUFFERS = 24
"""For staging, so few that those which get lost are missed."""


class Two:
    """Two nodes, one store, an instance on each, and a router that hears of `b`."""

    def __init__(self, folder: Path, depot: Depot) -> None:
        self.depot, self.undo = depot, ExitStack()
        self.first, self.second = (Node(folder / name, QUICK) for name in ("1", "2"))
        self.second.model = self.first.model
        for each in (self.first, self.second):
            self.undo.enter_context(each.undo)
            each.serve()
        self.router = Router(self.second.folder, "b")
        self.a = self.first.connect("a", self.settings(400))
        self.b = self.second.connect("b", self.settings(ROOM), **self.router.settings)

    def settings(self, chunks: int, rpc_seconds: float = 10, **offload: Any) -> dict[str, Any]:
        """Of a connector that tries again soon, and whose deadlines no slow machine misses.
        offload: of its section.
        """
        more = {"policy": "write_through", "staging_bytes": f"{BUFFERS * (CHUNK_BYTES + 4096)} B"}
        more |= {"retry_seconds": 0.1, "lookup_seconds": 10, "get_seconds": 10, **offload}
        mooncake = {"master": self.depot.master.address, "hostname": "127.0.0.1"}
        mooncake |= {"rpc_seconds": rpc_seconds}
        pool, connector = {"segment_bytes": f"{chunks * CHUNK_BYTES} B"}, {"min_hit_tokens": CHUNK}
        return {"pool": pool, "connector": connector, "offload": {"mooncake": mooncake, **more}}

    def names(self) -> set[str]:
        return names_in(self.depot)

    def keep(self, tokens: list[int], instance: Instance | None = None) -> tuple[Answer, set[str]]:
        """Have it computed by `instance`, by default `a`: its answer, and the names of the new objects, once all
        its chunks are in the store.
        """
        before = self.names()
        answer = (instance or self.a).one(tokens)
        chunks = len(tokens) // CHUNK - answer.cached // CHUNK
        new = eventually(lambda: len(found := self.names() - before) >= chunks and found)
        return answer, new

    def kept(self) -> tuple[list[int], Answer]:
        """A new prompt of four chunks and a tail: what `a`, which has it in its own cache
        and in the store, answers. The second node's pool is empty."""
        self.empty()
        tokens = new_tokens(HITS + 17)
        self.keep(tokens)
        return tokens, self.a.one(tokens)

    def hits_from_below(self, reader: Instance) -> None:
        """Once `a` and the reader can use the store again, all is as it was."""

        def written() -> bool:
            before = self.names()
            self.a.one(new_tokens(CHUNK + 1), max_tokens=1)
            time.sleep(0.05)
            return bool(self.names() - before)

        eventually(written)
        tokens, own = self.kept()

        def read() -> bool:
            self.empty()
            before = loaded(reader, "store")
            assert reader.again(tokens).said == own.said
            return loaded(reader, "store") == before + HITS

        eventually(read)
        # What it has read it stores in its pool again, beside its next steps.
        eventually(lambda: self.chunks() == HITS // CHUNK)

    def chunks(self) -> int:
        return int(self.second.stats().chunks)

    def empty(self) -> None:
        """The second node's pool holds nothing any more."""
        self.second.empty()


def loaded(instance: Instance, tier: str) -> int:
    return instance.counter("vllm:vcache_loaded_tokens", tier=tier)
