"""Other connectors beside ours."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from vcache_backend.integration.vllm import longest_hit
from vcache_backend.integration.vllm.boundary import OthersError
from vcache_backend.integration.vllm.longest_hit import Hits, LongestHit
from vcache_backend.integration.vllm.multi import VCacheMultiConnector
from vcache_backend.integration.vllm.others import ANSWERS, Guarded

HOOKS = [name for name in dir(KVConnectorBase_V1) if not name.startswith("_")]


@pytest.mark.parametrize("name", HOOKS)
def test_whatever_another_connector_raises_ends_there(name: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    child = Guarded(type("Raising", (), dict.fromkeys(HOOKS, fails))())
    assert [getattr(child, name)() for _ in "12"] == [ANSWERS.get(name, lambda: None)()] * 2
    assert child.off_at


def test_a_connector_that_cannot_begin_ends_the_start_as_it_does_alone() -> None:
    """Its half in the scheduler would go on, and vLLM's SimpleCPUOffloadConnector holds blocks until
    its worker has copied them."""

    def fails(_: object) -> None:
        raise AttributeError("no stream")

    child = Guarded(SimpleNamespace(register_kv_caches=fails))
    half = SimpleNamespace(off="", fail=pytest.fail, _others=[child])
    with pytest.raises(OthersError, match="cannot begin: AttributeError: no stream"):
        VCacheMultiConnector.register_kv_caches(half, {})


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
    longest = LongestHit([None, Guarded(SimpleNamespace(**told))], 16)
    answer = longest._ask(Hits(loader=loader), 1, request, 0)
    assert (answer, tracker.num_stored_tokens) == ((asked, False), stored)
    assert request.status == RequestStatus.WAITING


def test_an_lmcache_with_other_parts_is_out_of_use() -> None:
    assert Guarded(SimpleNamespace(worker_adapter=object())).off_at


class Late:
    """A connector that has its answers one question after the other."""

    request_trackers: Any

    def __init__(self, *answers: int | None) -> None:
        self.answers, self.asked = list(answers), list[int]()

    def get_num_new_matched_tokens(self, _: Any, computed: int) -> tuple[int | None, bool]:
        self.asked.append(computed)
        return self.answers.pop(0), True


class LateLMCache(Late):
    request_trackers: Any = {}


NEW = SimpleNamespace(request_id="one", status=RequestStatus.WAITING, num_tokens=512)


def joined(ours: int, other: Late) -> LongestHit:
    """Connectors side by side; ours has a hit of so many tokens."""
    return LongestHit([Late(*[ours] * 9), Guarded(other)], 16)


@pytest.mark.parametrize(("kind", "asked"), [(LateLMCache, 3), (Late, 1)])
def test_only_lmcache_is_asked_again_within_a_step(
    kind: type[Late], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OffloadingConnector sends its look-ups with the end of the step, and until then locks out
    what answers; LMCacheConnectorV1 sleeps 10 ms at each question."""
    monkeypatch.setattr(longest_hit, "LOOKUP_SECONDS", 60.0)
    other = kind(None, None, 64, 64)
    found = joined(0, other).of(Hits(), NEW, 0)
    assert (found, len(other.asked)) == ((64, True) if asked > 1 else (None, False), asked)


def test_a_request_that_begins_anew_waits_anew() -> None:
    """Preempted a minute after it had waited, it is not out of patience."""
    hits = Hits(since=-99.0)
    hits.allocated(None)
    assert joined(0, Late(None)).of(hits, NEW, 0) == (None, False)


def test_who_looks_up_for_each_question_is_asked_the_last_one_again() -> None:
    """As Mooncake's store with lookup_async: the longer hit is told once, and then looked up."""
    other, hits = Late(None, 64, None, 128, None), Hits()
    longest = joined(64, other)
    found = [longest.of(hits, NEW, 0) for _ in "123"]
    assert found == [(None, False), (None, False), (128, True)]
    assert other.asked == [64, 64, 0, 0]
