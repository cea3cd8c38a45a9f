"""LMCache's worker beside ours, when its server is restarted under it, and when it leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")
pytest.importorskip("lmcache.v1.multiprocess.transfer_context.shm", reason="no LMCache")

from lmcache.v1.multiprocess.transfer_context import shm
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from vcache_backend.integration.vllm.others import Guarded

SLOTS = [{"offset": 0, "length": 4, "shape": [1], "dtype": "float32"}]
SAID = SimpleNamespace(success=True, context={"slots": SLOTS, "chunk_indices": [0]})
ANSWER = SimpleNamespace(wait=lambda timeout: True, result=lambda timeout=0.0: SAID)


class Adapter:
    """LMCache's, as far as it is replaced; `registers` has it copy through another memory."""

    def __init__(self) -> None:
        self.instance_id, self.left = 7, list[int]()
        self.retrieve_futures: dict[str, Any] = {}
        self.transfer_ctx: Any = None
        self.child = Guarded(SimpleNamespace(worker_adapter=self))

    def registers(self, context: Any) -> None:
        self._send_register_kv_caches_request(context)

    def _send_register_kv_caches_request(self, context: Any) -> None:
        self.transfer_ctx = EngineDrivenTransferContext(7, None)
        self.transfer_ctx._engine_driven_context = context

    def get_finished(self) -> None:
        pass

    def shutdown(self) -> None:
        self.left += [self.instance_id, self.transfer_ctx._instance_id]

    def loads(self) -> Any:
        """Begin a load; its future."""
        cache = {"layer": torch.zeros(2, 1, 1, 1, 1)}
        return self.transfer_ctx.submit_retrieve("one", None, cache, [[0]], None, 1)


@pytest.fixture
def memories() -> Iterator[list[Any]]:
    memory = Path(f"/dev/shm/vcache-test-{os.getpid()}")
    memory.write_bytes(bytes(64))
    made = [shm.EngineDrivenContextShm(None, None, 1.0, memory.name, 64) for _ in "12"]
    memory.unlink()
    yield made
    for one in made:
        one.close()


def test_what_lmcache_has_not_written_is_not_committed(
    memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor written to the memory of a server that has died, once there is another one."""
    adapter, (dead, new) = Adapter(), memories
    adapter.registers(dead)
    assert dead._build_slot_tensors(SLOTS)

    def found_again(*_: Any) -> Any:
        """The server answers a heartbeat first."""
        adapter.registers(new)
        return ANSWER

    dead.req_client = SimpleNamespace(prepare_retrieve=found_again, prepare_store=lambda *_: ANSWER)
    # What raises in vLLM's thread puts LMCache out of use.
    assert dead.prepare_retrieve(None, 7) is None
    assert dead.prepare_store(None, 7) == (None, [0])
    assert not dead.commit_store(None, 7, [])
    assert new._build_slot_tensors(SLOTS)
    assert not caplog.messages
    adapter.registers(EngineDrivenContextPickle(None, None, 1.0))
    assert "LMCache pickles KV" in caplog.text
    adapter.shutdown()
    assert adapter.left == [0, 0]


@pytest.mark.parametrize("end", ["server restarted", "out of use", "shut down"])
def test_loads_under_way_end_as_failed(memories: list[Any], end: str) -> None:
    """Those that are queued, too, and at once: the server may never answer."""
    adapter, (dead, new), answers = Adapter(), memories, threading.Event()
    adapter.registers(dead)
    asked = threading.Event()

    def prepare(*_: Any) -> Any:
        asked.set()
        answers.wait(100)
        return ANSWER

    dead.req_client = SimpleNamespace(prepare_retrieve=prepare, commit_retrieve=lambda *_: ANSWER)
    old, futures = adapter.transfer_ctx, [adapter.loads() for _ in "12"]
    assert asked.wait(100)
    if end == "server restarted":
        adapter.registers(new)
    elif end == "out of use":
        adapter.child.fail("on purpose")
    else:
        adapter.shutdown()
    adapter.transfer_ctx = old
    futures.append(adapter.loads())
    assert [each.query() and each.result() for each in futures] == [False] * 3
    answers.set()
