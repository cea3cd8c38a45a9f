"""Generation tables and KV caches of others as this process opens them: when a mapping goes, what is
refused. What is read: test_sources. Real processes, a real server.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing

import neighbour_cases
import pytest
import torch
from engine_cases import said
from kv_cases import SMALL, Sizes
from neighbour_cases import Reader, instance, kv_mapped, mapped, owner, pull, read, still, threads
from processes import PATIENT, QUICK, SECONDS, Stage, asked, eventually, hung, make_memfd, until
from server_cases import few_descriptors, use_up

from vcache_backend.errors import SegmentError
from vcache_backend.resident.mappings import Neighbour, Refusals, Tables
from vcache_backend.resident.own_cache import cache_shape
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier
from vcache_backend.vram_pool.generations import Generations, GenerationView

ONE, TWO = instance(1), instance(2)
WORKER = {"scheduler": False}


@pytest.fixture
def reader(stage: Stage) -> Iterator[Reader]:
    with closing(Reader(stage.client())) as made:
        yield made


# ---- the end of an owner


def test_a_killed_owners_mapping_stays_while_a_copy_reads_it(stage: Stage, reader: Reader) -> None:
    with owner(stage) as there:
        there.ask("write", [4], 9)
        neighbour = reader.there(ONE)
        there.kill()
        eventually(lambda: reader.neighbours.get(ONE) is None)
        assert read(neighbour, reader.cache, 4) == 9
        assert kv_mapped() == 1
        del neighbour
        assert kv_mapped() == 0


def test_a_stopped_reader_of_a_dead_owners_memory_is_named_and_then_lets_go(stage: Stage) -> None:
    client = stage.client()
    with owner(stage) as there, owner(stage, 2) as keeping:
        eventually(lambda: keeping.ask("reads", ONE))
        both = kv_mapped(keeping.pid)
        with keeping.stopped():
            there.kill()
            left = [(TWO.hex(), keeping.pid)]
            eventually(lambda: [(it.id, it.stopped) for it in client.stats().instances] == left)
            assert kv_mapped(keeping.pid) == both
        eventually(lambda: kv_mapped(keeping.pid) == both - 1)


@pytest.mark.parametrize("victim", ["scheduler", "rank 1"])
def test_an_instance_ends_with_any_of_its_parts(stage: Stage, reader: Reader, victim: str) -> None:
    """Also of one that this reader does not even read from."""
    scheduler, first = (owner(stage, ranks=2, **of) for of in ({"rank": None}, WORKER))
    with scheduler, first, owner(stage, ranks=2, rank=1, **WORKER) as second:
        reader.there(ONE)
        (scheduler if victim == "scheduler" else second).kill()
        eventually(lambda: kv_mapped() == 0)


def test_a_live_owner_that_gives_its_cache_up_is_unmapped(stage: Stage, reader: Reader) -> None:
    """An engine that ends in a process that goes on."""
    with owner(stage) as there:
        reader.there(ONE)
        there.ask("leave")
        eventually(lambda: kv_mapped() == 0)
        assert reader.neighbours.get(ONE) is None


# ---- the server comes and goes


def test_a_neighbour_outlives_the_server_and_others_are_found_at_the_next(alone: Stage) -> None:
    first = alone.server()
    one, two = owner(alone, 1, QUICK), owner(alone, 2, QUICK)
    with one, two, closing(Reader(alone.client(QUICK))) as reader:
        generations = one.ask("write", [1], 11)
        neighbour = reader.there(ONE)
        first.kill()
        eventually(lambda: not reader.client.connected)
        assert reader.there(ONE) is neighbour
        assert read(neighbour, reader.cache, 1) == 11
        assert still(neighbour.view, [1], generations)
        assert mapped(reader.neighbours, TWO) is None
        alone.server()
        two.ask("write", [1], 12)
        assert read(reader.there(TWO), reader.cache, 1) == 12
        assert reader.neighbours.get(ONE) is neighbour
        del neighbour
        one.kill()
        eventually(lambda: kv_mapped() == 1)


def test_who_is_unknown_is_asked_for_once(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcache_backend.resident.mappings.RETRY_SECONDS", 1000.0)
    assert [mapped(reader.neighbours, ONE) for _ in range(50)] == [None] * 50
    assert asked(reader.client, "OpenInstance") == 1


def test_a_reader_that_has_run_out_of_descriptors_reads_again_once_it_has_some(
    stage: Stage, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in the opening that happens; and nothing is left of what was begun."""
    # It keeps what it is told, an error and all that its frames refer to. The level of a logger
    # above may have been set by others.
    caplog.set_level("CRITICAL", "vcache_backend.resident.mappings")
    monkeypatch.setattr("vcache_backend.resident.mappings.RETRY_SECONDS", 0.0)
    with owner(stage) as there:
        there.ask("write", [3], 40)
        eventually(lambda: [one for one in reader.client.stats().instances if not one.missing])
        # A thread of an earlier test would give back descriptors meanwhile.
        eventually(lambda: threads() == 1)
        gc.collect()
        before, tries = neighbour_cases.descriptors(), 0
        with few_descriptors() as taken:
            while mapped(reader.neighbours, ONE) is None:
                tries += 1
                use_up(taken)
                for _ in range(tries):
                    os.close(taken.pop())
        assert tries > 3
        assert kv_mapped() == 1
        # Two processes' ends; Python's mappings of a table and a KV cache.
        until(lambda: neighbour_cases.added_to(before).total() == 4, SECONDS)
        added = neighbour_cases.added_to(before)
        assert added.total() == 4, (added, before)
        assert read(reader.there(ONE), reader.cache, 3) == 40


# ---- what is refused


def test_a_cache_of_another_layout_is_refused(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with owner(stage, sizes=SMALL._replace(dim=32)), closing(Reader(stage.client())) as reader:
        caplog.set_level("WARNING")
        assert [mapped(reader.neighbours, ONE) for _ in range(3)] == [None] * 3
        assert asked(reader.client, "OpenCache") == 1
        lines = said(caplog, "cannot be read in place: its KV cache has layout ")
        assert len(lines) == len(said(caplog, "in place")) == 1
        assert (mapped(reader.neighbours, TWO), kv_mapped()) == (None, 0)


def test_an_fd_of_something_else_is_never_mapped() -> None:
    """Whatever the server lets pass. More of that: test_regions."""
    with closing(neighbour_cases.SharedCache()) as cache:
        shape = cache_shape(cache.kv, cache.region, neighbour_cases.HOST)
        with closing(Generations(ONE, shape.num_blocks)) as table:
            view = GenerationView(table.fd, ONE, shape.num_blocks)
        nbytes = cache.region.nbytes
    short, unsealed = make_memfd(nbytes - 1), make_memfd(nbytes, seals=False)
    for fd, why in ((short, "holds"), (unsealed, "not sealed against")):
        with pytest.raises(SegmentError, match=why):
            Neighbour(shape, view, fd, neighbour_cases.HOST)
        os.close(fd)


# ---- closing


def test_closing_unmaps_all_ends_the_thread_and_leaves_no_descriptor(stage: Stage) -> None:
    with owner(stage), owner(stage, 2):
        client = stage.client()
        client.stats()
        running, before = threads(), neighbour_cases.descriptors()
        reader = Reader(client)
        assert reader.there(ONE) is not reader.there(TWO)
        reader.close()
        reader.close()
        assert reader.neighbours.get(ONE) is None
        # One of an earlier test may have ended meanwhile.
        assert (kv_mapped(), threads() <= running) == (0, True)
        del reader
        assert not neighbour_cases.added_to(before)


def test_a_neighbour_of_which_nobody_knows_whether_it_lives_is_not_read(
    stage: Stage, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(view: GenerationView) -> bool:
        raise RuntimeError("planted")

    with owner(stage):
        reader.there(ONE)
        monkeypatch.setattr(GenerationView, "dead", property(fail))
        eventually(lambda: kv_mapped() == 0)
        # What is logged comes behind the unmapping, in another thread.
        eventually(lambda: "an error of vcache's own in vcache-neighbours" in caplog.text)
        assert mapped(reader.neighbours, ONE) is None


# ---- generation tables, as a scheduler looks at them


def there(tables: Tables, name: bytes = ONE) -> GenerationView:
    return eventually(lambda: tables.view(name))


def test_a_killed_owners_table_is_forgotten(stage: Stage) -> None:
    """Once, though somebody else holds the same pidfd, as the server does: epoll would go on
    telling of it, under a number that is another's by then."""
    client = stage.client()
    with owner(stage) as part, owner(stage, 2), closing(Tables(client)) as tables:
        _, held = client.open_instance(ONE)
        before = neighbour_cases.descriptors()
        there(tables)
        part.kill()
        eventually(lambda: tables.view(ONE) is None)
        assert not neighbour_cases.added_to(before)
        count = asked(client, "OpenInstance")
        assert [tables.view(ONE) for _ in range(9)] == [None] * 9
        assert asked(client, "OpenInstance") == count
        again = there(tables, TWO)
        for _ in range(3):
            time.sleep(0.1)  # so that it looks for ends again
            assert tables.view(TWO) is again
        assert tables.view(ONE) is None
        for fd in held:
            os.close(fd)


def test_a_hung_server_is_a_miss_for_a_while(alone: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcache_backend.resident.mappings.RETRY_SECONDS", 1000.0)
    server = alone.server()
    with owner(alone), closing(Tables(client := alone.client(PATIENT))) as tables:
        # By a call: no heartbeat notices before.
        with hung(server, client):
            assert tables.view(ONE) is None
        eventually(lambda: client.connected)
        assert tables.view(ONE) is None
        with closing(Tables(alone.client())) as others:
            there(others)


def test_what_was_refused_is_remembered_but_not_without_bound() -> None:
    refused = Refusals(most=9)
    for number in range(10):
        refused.add(instance(number))
    refused.add(instance(5), 0.0)
    expected = [False, True, False, True]
    assert [instance(number) in refused for number in (0, 1, 5, 9)] == expected


# ---- on real GPUs: read over NVLink, and given back when their owner dies

SIZES = Sizes(layers=4, heads=8, dim=128, blocks=64)
LIVES = 4


@pytest.fixture
def gpu_reader(stage: Stage) -> Iterator[Reader]:
    """A worker on `cuda:0`."""
    device = devices.resolve("cuda:0")
    with closing(Reader(stage.client(device=device.name), device, SIZES)) as made:
        yield made


@pytest.mark.gpu
def test_a_copy_out_of_a_killed_owners_memory_ends_well(stage: Stage, gpu_reader: Reader) -> None:
    """The owner dies while the copy waits in its stream; then the memory goes."""
    with owner(stage, device="cuda:0", sizes=SIZES) as there, ExitStack() as undo:
        copier = CudaCopier(0)
        undo.callback(copier.drain)
        generations = there.ask("write", [9], 90)
        neighbour = gpu_reader.there(instance(1))
        read(neighbour, gpu_reader.cache, 9, copier=copier)
        gpu_reader.cache.mark(0, 0)
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call] # some 0.6 s
        copy = pull(neighbour, gpu_reader.cache, 9, copier)
        there.kill()
        assert copy.wait(SECONDS)
        assert still(neighbour.view, [9], generations)
        assert gpu_reader.cache.held(0) == 90
        left = weakref.ref(neighbour)
        del neighbour, copy
        eventually(lambda: left() is None)
        gpu_reader.cache.mark(1, 7)
        torch.cuda.synchronize()
        assert gpu_reader.cache.held(1) == 7


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_the_memory_of_a_killed_owner_that_somebody_had_mapped_is_free_for_the_next(
    stage: Stage, gpu_reader: Reader
) -> None:
    """Each takes two fifths of the GPU, so that a third does not fit beside two that are dead."""
    block = SIZES.layers * 2 * SIZES.block_size * SIZES.heads * SIZES.dim * 2
    sizes = SIZES._replace(blocks=int(torch.cuda.mem_get_info(0)[1] * 0.4) // block)
    for life in range(1, LIVES + 1):
        with owner(stage, life, device="cuda:0", sizes=sizes) as there:
            mapped = weakref.ref(gpu_reader.there(instance(life)))
            there.kill()
            # Gone from here, with nobody asking; the server lets go a moment later.
            eventually(lambda left=mapped: left() is None)
        eventually(lambda: torch.cuda.mem_get_info(0)[0] >= sizes.blocks * block)
