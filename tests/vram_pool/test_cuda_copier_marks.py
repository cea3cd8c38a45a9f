"""Copies beside the work of the caller's stream: what comes after a mark, what waits for a fence,
and what does neither.
"""

# torch.cuda's streams have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import pytest
import torch
from test_copier import all_are, fill, large
from torch import Tensor

from vcache_backend.vram_pool.copies.copier import NOTHING
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier
from vcache_backend.vram_pool.regions import SlotView

pytestmark = pytest.mark.gpu(count=1)

LONG = 1_000_000_000
"""Cycles for which `torch.cuda._sleep` keeps a stream busy: about half a second."""
OLD, NEW = 7, 8


class Room:
    """64 MiB of KV in 32-KiB pages full of OLD, slots for all of it full of poison, and a copier
    that has its kernels.
    """

    def __init__(self, max_ctas: int = 0) -> None:
        self.caches, self.kv, self.plan, self.slots = large()
        fill(self.caches, OLD)
        self.copier = CudaCopier(0, max_ctas)
        self.copier.prepare(self.kv)
        torch.cuda.synchronize()

    @property
    def views(self) -> list[SlotView]:
        """As if they were on another GPU: `max_ctas` makes such copies slow."""
        return [SlotView.over(slot, local=False) for slot in self.slots]


def test_a_scatter_after_a_mark_is_not_waited_for_by_the_current_stream() -> None:
    """It waits itself, for a stream that is busy; the current one goes on, and reads what was there
    before.
    """
    room = Room()
    fill(room.slots, NEW)
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(LONG)
        mark = room.copier.mark()
    completion = room.copier.scatter(room.kv, room.plan, room.views, mark)
    seen = room.caches[0].clone()
    ended = torch.cuda.current_stream().record_event()
    ended.synchronize()
    assert not completion.done()
    assert all_are([seen], OLD)
    assert completion.wait(10)
    assert all_are(room.caches, NEW)


def test_a_scatter_comes_after_the_work_before_its_mark() -> None:
    """Who owned the blocks before may still write into them then."""
    room = Room()
    fill(room.slots, NEW)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    fill(room.caches, OLD + 2)
    mark = room.copier.mark()
    completion = room.copier.scatter(room.kv, room.plan, room.views, mark)
    assert not completion.done()
    assert completion.wait(10)
    assert all_are(room.caches, NEW)


@pytest.mark.parametrize("early", [False, True])
def test_a_scatter_does_not_wait_for_what_comes_after_its_mark(early: bool) -> None:
    """A model run of any length does not hold up a load. early: nor does what comes before it, nor
    does the current stream wait for the load."""
    room = Room()
    fill(room.slots, NEW)
    torch.cuda.synchronize()
    mark = NOTHING if early else room.copier.mark()
    torch.cuda._sleep(LONG)
    model_run = torch.cuda.current_stream().record_event()
    completion = room.copier.scatter(room.kv, room.plan, room.views, mark)
    assert completion.wait(10)
    assert not model_run.query()
    assert all_are(room.caches, NEW)


def overwritten_behind(room: Room, fenced: bool) -> list[Tensor]:
    """The slots of a slow gather, when the next owner of its blocks writes into them at once."""
    completion = room.copier.gather(room.kv, room.plan, room.views, room.copier.mark())
    if fenced:
        room.copier.fence(completion)
    fill(room.caches, NEW)
    assert completion.wait(30)
    torch.cuda.synchronize()
    return room.slots


def test_what_is_queued_behind_a_fence_does_not_reach_the_slots() -> None:
    """A store under way, whose blocks preemption gives to another request."""
    assert all_are(overwritten_behind(Room(max_ctas=1), fenced=True), OLD)


def test_without_the_fence_it_would() -> None:
    """The hazard is real: a gather by one thread block takes longer than writing over all of it."""
    assert not all_are(overwritten_behind(Room(max_ctas=1), fenced=False), OLD)


def test_a_fence_does_not_hold_up_the_host() -> None:
    room = Room()
    torch.cuda._sleep(LONG)
    completion = room.copier.gather(room.kv, room.plan, room.views, room.copier.mark())
    room.copier.fence(completion)
    assert not completion.done()
    assert completion.wait(10)
