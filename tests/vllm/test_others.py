"""Other connectors beside ours."""

from __future__ import annotations

from enum import Enum
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


def test_an_lmcache_with_other_parts_is_out_of_use() -> None:
    assert Guarded(SimpleNamespace(worker_adapter=object())).off_at
