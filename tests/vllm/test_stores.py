"""Which stores under way a step of vLLM waits for: those whose blocks it gives to somebody else,
and no others. And that a worker that closes waits for its copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Awaited, Copied, Node, UnfinishedCopier, node
from kv_cases import Cache, layout_of
from processes import QUICK, SECONDS, eventually

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from vcache_backend.integration.vllm.ends import LoadEnds
from vcache_backend.integration.vllm.metadata import Chunks, LoadSpec, StepMetadata, StoreSpec
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.integration.vllm.worker.loads import Loads
from vcache_backend.integration.vllm.worker.stores import Attached, Stores
from vcache_backend.protocol.messages import HASH_BYTES
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, Finished, Mark

FIRST, SECOND = [3, 4], [7, 8]
CHUNKS = [Chunks(bytes([number]) * 8, bytes([number]) * HASH_BYTES) for number in range(3)]


@dataclass(frozen=True)
class Behind(Finished):
    """A mark. stores: those that the model's stream waited for before it."""

    stores: tuple[int, ...] = ()


class Copier(UnfinishedCopier):
    """Each store ends when the test says so. fenced: the stores that were waited for, by number.
    after: of each load's copy, the stores that it waits for, as for all work launched before;
    None: it waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Completion] = []
        self.ends: list[threading.Event] = []
        self.fenced: list[int] = []
        self.after: list[tuple[int, ...] | None] = []

    def mark(self) -> Mark:
        return Behind(0.0, tuple(self.fenced))

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        if not job.to_origin:
            self.after.append(after.stores if isinstance(after, Behind) else None)
            return super().copy(job, after)
        self.finished = threading.Event()
        self.ends.append(self.finished)
        self.copies.append(super().copy(job, after))
        return self.copies[-1]

    def fence(self, copy: Completion) -> None:
        self.fenced.append([other is copy for other in self.copies].index(True))

    def drain(self) -> None:
        for end in self.ends:
            end.set()


class Worker:
    """A worker's stores, on a real session. Blocks 3 and 4 are being read for one chunk, 7 and 8
    for another.
    """

    def __init__(self, here: Node, at_once: bool = False) -> None:
        with here.client() as client:
            client.clear()
        self.copier, cache = Copier(), Cache()
        config = here.config("host", 1 << 20)
        self.session = session = Session(config, layout_of(cache), copier=self.copier)
        here.undo.callback(session.close)
        here.undo.callback(self.copier.drain)
        self.stores = Stores(Meter(), at_once)
        self.kv, self.block_size = session.bind(cache.tensors), cache.sizes.block_size
        self.attached = Attached(session, self.kv, self.block_size)
        for number, blocks in enumerate((FIRST, SECOND)):
            self.store(blocks, number)
        assert len(self.copier.ends) == 2

    def store(self, blocks: list[int], number: int) -> None:
        self.stores.start(self.attached, [StoreSpec(CHUNKS[number], blocks)])

    def settle(self) -> None:
        """The stores are over."""
        for end in self.copier.ends:
            end.set()
        assert self.session.flush(SECONDS)

    def loads(self, *specs: LoadSpec, ends: tuple[str, str] = ("", "")) -> Loads:
        """These loads, which begin once the stores are over. ends: see `StepMetadata`."""
        self.settle()
        loads = Loads(0, self.stores, Meter())
        loads.begin(self.attached, StepMetadata(list(specs), ends=ends))
        return loads

    def step(self, *fresh: list[int], **more: Any) -> list[int]:
        """The stores that a step waits for which gives away these blocks."""
        self.copier.fenced.clear()
        self.stores.fence(self.attached, StepMetadata(fresh=list(fresh), **more))
        return self.copier.fenced


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder: Path = tmp_path_factory.mktemp("fence")
    with node(folder, QUICK) as made:
        made.serve()
        yield made


@pytest.fixture
def worker(here: Node) -> Worker:
    return Worker(here)


def test_the_next_owner_of_a_block_waits_for_the_store_that_reads_it(worker: Worker) -> None:
    """As after a preemption: the blocks of the request that had to go are somebody else's in the
    same step. A step that gives away other blocks waits for nothing.
    """
    assert worker.step() == worker.step([1, 2], [9]) == []
    assert worker.step([1, 2], [8]) == [1]
    assert worker.step([4]) == [0]
    assert worker.step([3]) == [0]
    worker.copier.ends[0].set()
    assert worker.step([3]) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_a_load_waits_for_the_stores_that_read_its_blocks(worker: Worker, at_once: bool) -> None:
    """And else for the steps under way, or for nothing. So does another connector's."""
    worker.settle()
    worker.store([5, 6], 2)
    loads, waited = Loads(0, worker.stores, Meter(), at_once=at_once), list[bool]()

    def load(*blocks: int) -> None:
        worker.copier.fenced.clear()
        spec = LoadSpec("r", CHUNKS[0], [*blocks], number=len(worker.copier.after) + 1)
        loads.begin(worker.attached, StepMetadata([spec], fresh=[[*blocks]]))
        waited.append(loads.waits)
        eventually(lambda: loads.ends(idle=False).over == {"r"})

    load(1, 2)
    load(6, 9)
    worker.settle()
    load(6, 9)
    nothing = None if at_once else ()
    assert worker.copier.after == [nothing, (2,), nothing]
    assert waited == [not at_once, True, not at_once]


def test_a_block_that_a_load_left_out_is_nobodys(worker: Worker, here: Node) -> None:
    """Two requests with such blocks have nothing to do with each other."""
    chunks = Chunks(bytes([8]) * 8, bytes(range(2 * HASH_BYTES)))
    load, keys = LoadSpec("r", chunks, [-1, -1, 5, 6]), worker.session.own(chunks.keys)
    with here.client() as client:
        epoch = client.present(keys).epoch
    worker.stores.promote(worker.attached, load, keys, [1], epoch)
    assert worker.step([5]) == [2]
    assert worker.step([-1, 9]) == []


def test_what_a_reset_has_made_old_is_not_stored(worker: Worker, here: Node) -> None:
    """The server says so when it grants the slots, which are given back."""
    new = Chunks(bytes([9]) * 8, bytes([9]) * HASH_BYTES)
    with here.client() as client:
        client.clear(new.namespace, reset=True)
        epoch = client.present(new.keys).epoch
    for end in worker.copier.ends:
        end.set()
    for other in (0, epoch - 2):
        worker.stores.start(worker.attached, [StoreSpec(new, [5, 6], other)])
    assert len(worker.copier.ends) == 2
    assert worker.session.stats.counted("not_stored_")["outdated"] == 2

    def stored() -> bool:
        worker.stores.start(worker.attached, [StoreSpec(new, [5, 6], epoch)])
        return len(worker.copier.ends) == 3

    eventually(stored)


def test_a_model_with_states_waits_for_each_store_before_its_next_step(here: Node) -> None:
    """Which clears blocks, and copies states, before it says which are whose."""
    assert Worker(here, at_once=True).copier.fenced == [0, 1]


def test_a_closing_worker_awaits_a_loads_copy(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask again and again, on a core that the copy may need."""
    worker, copy, begun = Worker(here), Awaited(threading.Event()), threading.Event()
    monkeypatch.setattr(worker.copier, "copy", lambda *_, **__: begun.set() or copy)
    loads = worker.loads(LoadSpec("r", CHUNKS[0], [5, 6], number=1))
    eventually(lambda: loads.ends(idle=False).over == set() and begun.is_set())
    loads.stop(time.monotonic() + SECONDS)
    assert copy.done()
    # A second load of the same request, while vLLM sleeps. Each has a report of its own, since
    # `AwaitedLoads` counts.
    loads.begin(None, StepMetadata([LoadSpec("r")]))
    assert [loads.ends(idle=False).over for _ in range(3)] == [{"r"}, {"r"}, set()]


def test_no_step_waits_for_a_loads_end(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that runs no model here: other expert parallel ranks wait for it."""
    worker, end = Worker(here), threading.Event()
    monkeypatch.setattr(worker.copier, "copy", lambda *_, **__: Copied(end))
    loads = worker.loads(LoadSpec("r", CHUNKS[0], [5, 6], number=1))
    assert not any(loads.ends(idle=True).over for _ in range(3))
    end.set()
    eventually(lambda: loads.ends(idle=True).over == {"r"})


def test_of_a_load_that_failed_vllm_hears_with_its_unfilled_blocks(worker: Worker) -> None:
    """No sooner, or its request would run."""
    lost = LoadSpec("lost", CHUNKS[2], [1, 2], number=1)
    right = LoadSpec("right", CHUNKS[0], [5, 6], number=2)
    ends, told, invalid = LoadEnds(1), set[str](), set[int]()
    loads = worker.loads(lost, right, ends=ends.address)

    def hear() -> bool:
        heard = loads.ends(idle=False)
        told.update(heard.over)
        invalid.update(heard.invalid)
        return told == {"lost", "right"}

    eventually(hear)
    assert [ends.in_all(load.number) for load in (lost, right)] == [False, True]
    assert invalid == {1, 2}
    ends.close()
