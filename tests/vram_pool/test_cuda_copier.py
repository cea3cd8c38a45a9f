"""Copies beside the work of the caller's stream: what comes after a mark, what waits for a fence,
and what does neither; and what a copy holds until it is over."""

# torch.cuda's streams have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from vcache_backend.errors import VCacheError
from vcache_backend.vram_pool.copies.copier import NOTHING, Completion, CopyJob, Mark
from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion, CudaCopier
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, placed, slot_rows

LONG = 1_000_000_000
"""Cycles for which `torch.cuda._sleep` keeps a stream busy: about half a second."""
OLD, NEW = 7, 8


# ---- completions


class FakeEvent:
    """A CUDA event at our seam: not reached until told, or broken."""

    def __init__(self) -> None:
        self.reached = False
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error:
            raise self.error
        return self.reached

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.5


class Held:
    """Something a copy uses."""


def under_way(held: object) -> tuple[CudaCompletion, FakeEvent]:
    end = FakeEvent()
    return CudaCompletion(torch.device("cuda", 0), FakeEvent(), end, held), end  # type: ignore[arg-type]


def test_a_wait_ends_at_its_deadline() -> None:
    completion, _ = under_way(Held())
    for timeout in (0.0, 0.02):
        assert not completion.wait(timeout)
    assert completion.seconds is None


def test_what_a_copy_uses_is_held_until_it_is_over() -> None:
    held = Held()
    alive = weakref.ref(held)
    completion, end = under_way(held)
    del held
    gc.collect()
    assert not completion.done()
    assert alive() is not None
    end.reached = True
    assert completion.done()
    assert alive() is None


def test_a_device_that_failed_is_one_of_our_errors() -> None:
    completion, end = under_way(Held())
    end.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(VCacheError, match="copy on cuda:0: an illegal memory access"):
        completion.wait(1)


# ---- on a GPU


def all_are(tensors: Sequence[Tensor], value: int) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


def fill(tensors: Sequence[Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.fill_(value)


class Room:
    """KV in 32-KiB pages on one GPU, 8 MiB a layer and full of OLD, slots for all of it full of
    NEW, and a copier that has its kernels: large enough that a copy takes a while.

    The slots pass for another GPU's: `max_ctas` makes such copies slow.
    """

    def __init__(self, layers: int = 8, max_ctas: int = 0, gpu: int = 0, slots_on: int = 0) -> None:
        shape = 256, 16, 8, 256
        self.caches = [
            torch.full(shape, OLD, dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(layers)
        ]
        self.kv = PagedKV.describe(self.caches, 16)
        self.plan = placed(self.kv, np.random.default_rng(0).permutation(256))
        self.slots = [
            torch.full(
                (self.kv.chunk_bytes(256),), NEW, dtype=torch.uint8, device=f"cuda:{slots_on}"
            )
            for _ in range(16)
        ]
        self.copier = CudaCopier(gpu, max_ctas)
        self.copier.prepare(self.kv)
        torch.cuda.synchronize(gpu)
        torch.cuda.synchronize(slots_on)

    @property
    def rows(self) -> tuple[Int64s, Int64s]:
        addresses = np.array([slot.data_ptr() for slot in self.slots])
        return slot_rows(self.kv, 256, self.plan, addresses)

    def gather(self, after: Mark | None = None) -> Completion:
        job = CopyJob(self.kv, *self.rows, self.slots, to_origin=True)
        return self.copier.copy(job, after)

    def pull(self, after: Mark | None = None) -> Completion:
        return self.copier.copy(CopyJob(self.kv, *self.rows, self.slots), after)


@pytest.mark.gpu
def test_what_a_pull_reads_is_held_until_it_is_over() -> None:
    mine, other = Room(1), Room(1)
    fill(other.caches, NEW)
    held = Held()
    alive = weakref.ref(held)
    rows = np.zeros((256, 3), dtype=np.int64)
    rows[:, 1], rows[:, 2] = np.arange(256) * other.kv.planes[0, 1], np.arange(256)
    # The collection of garbage takes long.
    torch.cuda._sleep(4 * LONG)
    job = CopyJob(mine.kv, rows, other.kv.planes[None, :, 0], held)
    pulled = mine.copier.copy(job)
    del held, job
    gc.collect()
    assert not pulled.done()
    assert alive() is not None
    assert pulled.wait(10)
    assert alive() is None
    assert all_are(mine.caches, NEW)


@pytest.mark.gpu
def test_a_store_takes_what_earlier_work_wrote_and_nothing_of_later_work() -> None:
    """Of a stream of the caller's; the store itself is slow."""
    room, mine = Room(max_ctas=1), torch.cuda.Stream()
    with torch.cuda.stream(mine):
        torch.cuda._sleep(LONG)
        fill(room.caches, 9)
        completion = room.gather()
        fill(room.caches, 1)
    assert completion.wait(10)
    assert all_are(room.slots, 9)


@pytest.mark.gpu
def test_a_load_leaves_earlier_readers_the_old_bytes_and_gives_later_ones_the_new() -> None:
    room = Room()
    torch.cuda._sleep(LONG)
    earlier = [cache.clone() for cache in room.caches]
    completion = room.pull()
    later = [cache.clone() for cache in room.caches]
    assert completion.wait(10)
    assert all_are(earlier, OLD)
    assert all_are(later, NEW)


@pytest.mark.gpu
def test_a_new_table_does_not_lie_where_queued_work_still_writes() -> None:
    """torch hands a freed tensor's memory out again at once, while the work that uses it is still
    queued. A copy's table is written without waiting for that work."""
    room = Room()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    freed = [torch.empty(1024 * 24, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda._sleep(LONG)
    for tensor in freed:
        tensor.fill_(0)
    del freed, tensor
    completion = room.gather()
    assert not completion.done()
    assert completion.wait(10)
    assert all_are(room.slots, OLD)


@pytest.mark.gpu
def test_tables_of_copies_that_wait_in_line_are_not_overwritten() -> None:
    room = Room(1)
    for block, page in enumerate(room.caches[0]):
        page.fill_(block)
    torch.cuda._sleep(LONG)
    stored = []
    for block in range(64):
        slot = torch.zeros(room.kv.chunk_bytes(16), dtype=torch.uint8, device="cuda")
        addresses = np.array([slot.data_ptr()])
        rows = slot_rows(room.kv, 16, placed(room.kv, np.array([block])), addresses)
        job = CopyJob(room.kv, *rows, slot, local=True, to_origin=True)
        stored.append((room.copier.copy(job), slot))
    for block, (completion, slot) in enumerate(stored):
        assert completion.wait(10)
        assert all_are([slot], block)


@pytest.mark.gpu(count=2)
def test_slots_on_another_gpu_are_read_and_written_from_a_thread_on_the_first() -> None:
    room = Room(gpu=1)
    # A plain copy makes torch open peer access both ways.
    torch.empty(1, device="cuda:0").copy_(torch.empty(1, device="cuda:1"))
    torch.empty(1, device="cuda:1").copy_(torch.empty(1, device="cuda:0"))
    for cache in room.caches:
        cache.random_(256)
    before = [cache.clone() for cache in room.caches]
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert room.gather().wait(10)
    fill(room.caches, 0)
    torch.cuda.synchronize(1)
    assert room.pull().wait(10)
    assert all(torch.equal(*pair) for pair in zip(room.caches, before, strict=True))


@pytest.mark.gpu
def test_a_load_after_a_mark_is_not_waited_for_by_the_current_stream() -> None:
    """It waits itself, for a stream that is busy; the current one goes on, and reads what was there
    before.
    """
    room, busy = Room(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(LONG)
        mark = room.copier.mark()
    completion = room.pull(mark)
    seen = room.caches[0].clone()
    torch.cuda.current_stream().record_event().synchronize()
    assert not completion.done()
    assert all_are([seen], OLD)
    assert completion.wait(10)
    assert all_are(room.caches, NEW)


@pytest.mark.gpu
def test_copiers_of_a_gpu_do_not_wait_for_each_other() -> None:
    held, free, busy = Room(), Room(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(LONG)
        mark = held.copier.mark()
    waits = held.pull(mark)
    assert free.pull(NOTHING).wait(10)
    assert not waits.done()
    assert all_are(free.caches, NEW)
    assert waits.wait(10)


@pytest.mark.gpu
def test_a_load_comes_after_the_work_before_its_mark() -> None:
    """Who owned the blocks before may still write into them then."""
    room = Room()
    torch.cuda._sleep(LONG)
    fill(room.caches, OLD + 2)
    completion = room.pull(room.copier.mark())
    assert not completion.done()
    assert completion.wait(10)
    assert all_are(room.caches, NEW)


@pytest.mark.gpu
def test_who_waits_for_a_mark_waits_for_the_work_before_it() -> None:
    room = Room()
    torch.cuda._sleep(LONG)
    mark = room.copier.mark()
    torch.cuda._sleep(LONG)
    model_run = torch.cuda.current_stream().record_event()
    assert not mark.reached()
    assert mark.wait(10)
    assert mark.reached()
    assert not model_run.query()


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_load_does_not_wait_for_what_comes_after_its_mark(early: bool) -> None:
    """A model run of any length does not hold up a load. early: nor does what comes before it, nor
    does the current stream wait for the load."""
    room = Room()
    mark = NOTHING if early else room.copier.mark()
    torch.cuda._sleep(LONG)
    model_run = torch.cuda.current_stream().record_event()
    completion = room.pull(mark)
    assert completion.wait(10)
    assert not model_run.query()
    assert all_are(room.caches, NEW)


@pytest.mark.gpu
@pytest.mark.parametrize("fenced", [True, False])
def test_what_is_queued_behind_a_fence_does_not_reach_the_slots(fenced: bool) -> None:
    """A store under way, whose blocks preemption gives to another request. The fence does not hold
    up the host. Without it the hazard is real: a gather by one thread block takes longer than
    writing over all of it."""
    room = Room(max_ctas=1)
    torch.cuda._sleep(LONG)
    completion = room.gather(room.copier.mark())
    if fenced:
        room.copier.fence(completion)
        assert not completion.done()
    fill(room.caches, NEW)
    assert completion.wait(30)
    torch.cuda.synchronize()
    assert all_are(room.slots, OLD) == fenced
