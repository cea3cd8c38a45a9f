"""The thread that unmaps what was a dead owner's, beside what the tests of neighbours see of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from neighbour_cases import EACH, HOST, SharedCache, enters, instance, kv_mapped
from processes import SECONDS, eventually, script

from vcache_backend.metadata_server.messages import CacheShape
from vcache_backend.resident.generations import Generations, GenerationView
from vcache_backend.resident.neighbours import Neighbour
from vcache_backend.resident.own_cache import cache_shape
from vcache_backend.resident.unmapper import LOOK_SECONDS, Unmapper


class Owners:
    """KV caches that this process maps as if they were others'."""

    def __init__(self) -> None:
        self.cache = SharedCache()
        self.shape: CacheShape = cache_shape(self.cache.kv, self.cache.regions, HOST)
        self.table = Generations(instance(1), self.shape.num_blocks)

    def neighbour(self) -> Neighbour:
        view = GenerationView.open(self.table.fd, instance(1), self.shape.num_blocks)
        made = Neighbour(instance(1), self.shape, view, EACH)
        made.map([self.cache.regions[0].fd], HOST)
        return made

    def close(self) -> None:
        self.table.close()
        self.cache.close()


@pytest.fixture
def owners() -> Iterator[Owners]:
    with closing(Owners()) as made:
        yield made


def test_the_end_of_one_owner_ends_no_other_that_was_admitted_meanwhile(owners: Owners) -> None:
    """While the first end is dealt with, somebody admits a living owner: its pidfds may get the
    same numbers.
    """
    living: list[Neighbour] = []

    def admit_another(ended: Neighbour) -> None:
        if not living:
            living.append(owners.neighbour())
            assert unmapper.admit(living[0], [os.pidfd_open(os.getpid()) for _ in ends])

    unmapper = Unmapper(admit_another)
    with script("input()") as process:
        ends = [os.pidfd_open(process.pid) for _ in range(8)]
        dead = owners.neighbour()
        assert unmapper.admit(dead, ends)
        process.kill()
    eventually(lambda: not enters(dead))
    eventually(lambda: living)
    eventually(lambda: kv_mapped() == 1)
    time.sleep(3 * LOOK_SECONDS)
    assert enters(living[0])
    unmapper.close(SECONDS)
    assert kv_mapped() == 0
    assert not unmapper.admit(owners.neighbour(), [])


def test_when_the_thread_fails_nothing_is_read_any_more(
    owners: Owners, caplog: pytest.LogCaptureFixture
) -> None:
    """Or an owner's end would never be noticed."""

    def fail(ended: Neighbour) -> None:
        if ended is first:
            raise RuntimeError("planted")

    unmapper = Unmapper(fail)
    first, second = owners.neighbour(), owners.neighbour()
    with script("input()") as process:
        assert unmapper.admit(second, [os.pidfd_open(os.getpid())])
        assert unmapper.admit(first, [os.pidfd_open(process.pid)])
        process.kill()
    eventually(lambda: unmapper.closed and kv_mapped() == 0)
    assert not second.enter()
    unmapper.close(SECONDS)
    assert "their ends would go unnoticed" in caplog.text
