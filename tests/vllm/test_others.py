"""Other connectors beside ours."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from vcache_backend.integration.vllm.multi import RequestState, VCacheMultiConnector
from vcache_backend.integration.vllm.others import ANSWERS, Guarded

HOOKS = [name for name in dir(KVConnectorBase_V1) if not name.startswith("_")]


@pytest.mark.parametrize("name", HOOKS)
def test_whatever_another_connector_raises_ends_there(name: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    child = Guarded(type("Raising", (), dict.fromkeys(HOOKS, fails))())
    assert [getattr(child, name)() for _ in "12"] == [ANSWERS.get(name, lambda: None)()] * 2
    assert child.off_at


States = Enum("States", "READY BYPASS_LMCACHE")
Before = Enum("Before", "READY")


@pytest.mark.parametrize(
    ("loader", "states", "stored", "asked"),
    [
        # Below 0.5.6 it adds its answers up, and what it takes for stored it does not store.
        (None, Before, 0, RequestStatus.WAITING),
        (0, States, 256, RequestStatus.PREEMPTED),
        (1, States, 256, RequestStatus.WAITING),
        # It would store out of the failed load's blocks, which are somebody else's, or load for
        # ever: preempted, it begins anew.
        (1, Before, 256, RequestStatus.PREEMPTED),
    ],
)
def test_lmcache_begins_anew_where_a_request_does(
    loader: int | None, states: Any, stored: int, asked: RequestStatus
) -> None:
    tracker = SimpleNamespace(num_stored_tokens=256, state=states.READY)
    request = SimpleNamespace(request_id="one", status=RequestStatus.WAITING)
    told = {"request_trackers": {"one": tracker}}
    told["get_num_new_matched_tokens"] = lambda request, _: (request.status, False)
    both = SimpleNamespace(_connectors=[None, Guarded(SimpleNamespace(**told))])
    answer = VCacheMultiConnector._ask(both, RequestState(loader=loader), 1, request, 0)
    assert (answer, tracker.num_stored_tokens) == ((asked, False), stored)
    assert request.status == RequestStatus.WAITING


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
