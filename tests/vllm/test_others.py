"""Other connectors beside ours."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vcache_backend.integration.vllm.others import ANSWERS, Guarded

HOOKS = [name for name in dir(KVConnectorBase_V1) if not name.startswith("_")]


@pytest.mark.parametrize("name", HOOKS)
def test_whatever_another_connector_raises_ends_there(name: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    child = Guarded(type("Raising", (), dict.fromkeys(HOOKS, fails))())
    assert [getattr(child, name)() for _ in "12"] == [ANSWERS.get(name, lambda: None)()] * 2
    assert child.off_at


def test_what_lmcache_has_answered_before_is_forgotten() -> None:
    """Below 0.5.6 it adds up, and what it takes for stored it does not store."""
    told = SimpleNamespace(num_stored_tokens=512)
    child = Guarded(SimpleNamespace(request_trackers={"asked": told}))
    for name in ("asked", "new"):
        child.forget_answers(name)
    assert told.num_stored_tokens == 0


def test_what_lmcache_has_not_written_is_not_committed(caplog: pytest.LogCaptureFixture) -> None:
    """Nor written to the memory of a server that has died, once there is another one."""
    shm = pytest.importorskip("lmcache.v1.multiprocess.transfer_context.shm")
    from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle

    left: list[int] = []
    adapter = SimpleNamespace(instance_id=7, transfer_ctx=None)
    adapter.shutdown = lambda: left.extend((adapter.instance_id, adapter.transfer_ctx._instance_id))
    adapter._send_register_kv_caches_request = lambda context: vars(adapter).update(
        transfer_ctx=SimpleNamespace(_engine_driven_context=context, _instance_id=7)
    )
    Guarded(SimpleNamespace(worker_adapter=adapter))
    memory = Path(f"/dev/shm/vcache-test-{os.getpid()}")
    memory.write_bytes(bytes(64))
    dead, new = (shm.EngineDrivenContextShm(None, None, 1.0, memory.name, 64) for _ in "12")
    memory.unlink()
    slots = [{"offset": 0, "length": 4, "shape": [1], "dtype": "float32"}]
    adapter._send_register_kv_caches_request(dead)
    assert dead._build_slot_tensors(slots)

    said = SimpleNamespace(success=True, context={"slots": slots, "chunk_indices": [0]})
    answer = SimpleNamespace(wait=lambda timeout: True, result=lambda timeout=0.0: said)

    def found_again(*_: Any) -> Any:
        """The server answers a heartbeat first."""
        adapter._send_register_kv_caches_request(new)
        return answer

    dead.req_client = SimpleNamespace(prepare_retrieve=found_again, prepare_store=lambda *_: answer)
    # What raises in vLLM's thread puts LMCache out of use.
    assert dead.prepare_retrieve(None, 7) is None
    assert dead.prepare_store(None, 7) == (None, [0])
    assert not dead.commit_store(None, 7, [])
    assert new._build_slot_tensors(slots)
    assert not caplog.messages
    adapter._send_register_kv_caches_request(EngineDrivenContextPickle(None, None, 1.0))
    assert "LMCache pickles KV" in caplog.text
    adapter.shutdown()
    assert left == [0, 0]


def test_an_lmcache_with_other_parts_is_out_of_use() -> None:
    assert Guarded(SimpleNamespace(worker_adapter=object())).off_at
