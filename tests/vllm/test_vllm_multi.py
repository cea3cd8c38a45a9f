"""Real vLLM on the CPU with our connector and LMCache's server mode side by side: `lmcache server` as
its users start it, two instances, and `aside`, vLLM alone, whose answers are right.

A hit of ours ends with a block of 32 tokens, one of LMCache's with a chunk of 64, so the number of
cached tokens tells who has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm_cases
from processes import Worker, eventually
from vllm_cases import BLOCK, CHUNK, IN_PLACE, SMALL, Instance, Node, Prompt, new_tokens, quick

from benchmarks.processes import free_ports

__all__ = ["quick"]
pytestmark = [
    vllm_cases.needs_vllm,
    pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache"),
]
LENGTH = 3 * CHUNK
"""Of prompts: ours finds a block more than LMCache."""
TOKENS = LENGTH + BLOCK + 5


class Beside:
    """`lmcache server`, and instances with both connectors."""

    def __init__(self, here: Node, megabytes: int = 512) -> None:
        self.here, self.megabytes = here, megabytes
        self.port, self.http = free_ports(2)
        self.serve()

    def serve(self) -> None:
        told = f"server --host 127.0.0.1 --port {self.port} --http-port {self.http} --chunk-size {CHUNK}"
        told += f" --l1-size-gb {self.megabytes / 1024} --eviction-policy LRU"
        told += " --supported-transfer-mode engine_driven --disable-observability"
        log = self.here.folder / f"lmcache-{self.port}.log"
        self.server = Worker(vllm_cases.home(), object, name="lmcache", log=log)
        self.here.undo.enter_context(self.server)
        self.server.tell(_lmcache, told.split())

    def start(self, name: str, **arguments: Any) -> Instance:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        extra |= {"lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.mq_timeout": 20.0}
        extra |= {"lmcache.mp.heartbeat_interval": 0.1}
        both = {"kv_role": "kv_both"}
        theirs = both | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        inside = {"connectors": [self.here.transfer(IN_PLACE), theirs]}
        given = both | {"kv_connector": "VCacheMultiConnector", "kv_connector_extra_config": inside}
        made = self.here.alone(name, kv_transfer_config=given, **arguments)
        made.in_place = True
        return made


def _lmcache(_: object, arguments: list[str]) -> None:
    import sys

    from lmcache.cli.main import main

    sys.argv = ["lmcache", *arguments]
    main()


@pytest.fixture(scope="module")
def beside(quick: Node) -> Beside:
    made = Beside(quick)
    quick.a, quick.b, quick.aside = made.start("a"), made.start("b"), quick.alone("aside")
    return made


def test_first(beside: Beside, quick: Node) -> None:
    import time

    t = time.monotonic()
    a, b = quick.a, quick.b
    tokens = new_tokens(TOKENS)
    try:
        x = a.one(tokens)
        print("first", time.monotonic() - t)
        a.ask("told")
        y = b.one(tokens)
        print(x.cached, y.cached, y.agrees(x))
        for i in (a, b):
            eventually(lambda: (i.step(1), i.ask("forget"))[1])
        z = b.one(tokens)
        print(z.cached, z.agrees(x), quick.aside.one(tokens).agrees(x))
    finally:
        for n in ("a.log", f"lmcache-{beside.port}.log"):
            print((quick.folder / n).read_text()[-5000:])
    raise AssertionError
