"""The thread that unmaps what was a dead owner's, beside what the tests of neighbours see of it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from neighbour_cases import (
    EACH,
    HOST,
    SharedCache,
    added_to,
    descriptors,
    enters,
    instance,
    kv_mapped,
)
from processes import SECONDS, eventually, script

from vcache_backend.metadata_server.messages import CacheShape
from vcache_backend.resident.generations import Generations, GenerationView
from vcache_backend.resident.neighbours import Neighbour
from vcache_backend.resident.own_cache import cache_shape
from vcache_backend.resident.unmapper import Unmapper


class Owners:
    """KV caches that this process maps as if they were others'."""

    def __init__(self) -> None:
        self.cache = SharedCache()
        self.shape: CacheShape = cache_shape(self.cache.kv, self.cache.regions, HOST)
        self.table = Generations(instance(1), self.shape.num_blocks)

    def neighbour(self, unmapper: Unmapper[Neighbour]) -> Neighbour:
        view = GenerationView.open(self.table.fd, instance(1), self.shape.num_blocks)
        made = Neighbour(instance(1), self.shape, view, EACH, unmapper.wake)
        made.map([self.cache.regions[0].fd], HOST)
        return made

    def close(self) -> None:
        self.table.close()
        self.cache.close()


@pytest.fixture
def owners() -> Iterator[Owners]:
    with closing(Owners()) as made:
        yield made


def test_a_descriptor_that_is_used_again_at_once_does_not_end_its_new_owner(owners: Owners) -> None:
    """Two ends are noticed together; while the first is dealt with, somebody admits a living owner
    under the same numbers.
    """
    living: list[Neighbour] = []

    def admit_another(ended: Neighbour) -> None:
        if living:
            return
        living.append(owners.neighbour(unmapper))
        assert unmapper.admit(living[0], [os.pidfd_open(os.getpid()) for _ in ends])

    unmapper: Unmapper[Neighbour] = Unmapper(admit_another)
    with script("input()") as process:
        ends = [os.pidfd_open(process.pid) for _ in range(8)]
        dead = owners.neighbour(unmapper)
        assert unmapper.admit(dead, ends)
        process.kill()
    eventually(lambda: not enters(dead))
    eventually(lambda: living)
    eventually(lambda: kv_mapped() == 1)
    assert living[0].enter()
    living[0].leave()
    unmapper.close(SECONDS)
    assert kv_mapped() == 0


def test_an_end_is_told_once_though_somebody_else_holds_the_same_pidfd(owners: Owners) -> None:
    """As the server does, who sent it. Epoll would go on telling of it, under a number that is a
    living owner's by then.
    """
    unmapper: Unmapper[Neighbour] = Unmapper(lambda ended: None)
    dead, living = owners.neighbour(unmapper), owners.neighbour(unmapper)
    with script("input()") as process:
        end = os.pidfd_open(process.pid)
        held = os.dup(end)
        assert unmapper.admit(dead, [end])
        process.kill()
        eventually(lambda: kv_mapped() == 1)
        with open(os.pidfd_open(os.getpid()), "rb", buffering=0) as own:
            again = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, end)
        assert again == end
        assert unmapper.admit(living, [again])
        for _ in range(10):
            unmapper.wake()
            time.sleep(0.01)
    assert enters(living)
    os.close(held)
    unmapper.close(SECONDS)
    assert kv_mapped() == 0


def test_what_was_never_admitted_is_unmapped_whether_there_is_a_thread_or_not(
    owners: Owners,
) -> None:
    unmapper: Unmapper[Neighbour] = Unmapper(lambda ended: None)
    first, second = owners.neighbour(unmapper), owners.neighbour(unmapper)
    unmapper.discard(first)
    eventually(lambda: kv_mapped() == 1)
    unmapper.close(SECONDS)
    assert not unmapper.admit(second, [])
    unmapper.discard(second)
    assert (kv_mapped(), first.enter(), second.enter()) == (0, False, False)
    second.forbid()
    unmapper.wake()


def test_a_descriptor_that_cannot_be_waited_for_admits_nothing_and_leaves_nothing_watched(
    owners: Owners,
) -> None:
    unmapper: Unmapper[Neighbour] = Unmapper(lambda ended: None)
    neighbour = owners.neighbour(unmapper)
    with script("input()") as process, open("/dev/null") as never:
        before = descriptors()
        end = os.pidfd_open(process.pid)
        for bad in (never.fileno(), end):
            # A file that epoll does not take; the same number twice.
            with pytest.raises(OSError, match="Operation not permitted|File exists"):
                unmapper.admit(neighbour, [end, bad])
        os.close(end)
        assert not added_to(before)
        process.kill()
    assert neighbour.enter()
    neighbour.leave()
    unmapper.close(SECONDS)
    unmapper.discard(neighbour)
    assert kv_mapped() == 0


def test_when_the_thread_fails_nothing_is_read_any_more(
    owners: Owners, caplog: pytest.LogCaptureFixture
) -> None:
    """Or an owner's end would never be noticed."""

    def fail(ended: Neighbour) -> None:
        if ended is first:
            raise RuntimeError("planted")

    unmapper: Unmapper[Neighbour] = Unmapper(fail)
    first, second = owners.neighbour(unmapper), owners.neighbour(unmapper)
    with script("input()") as process:
        assert unmapper.admit(second, [os.pidfd_open(os.getpid())])
        assert unmapper.admit(first, [os.pidfd_open(process.pid)])
        process.kill()
    eventually(lambda: unmapper.closed and kv_mapped() == 0)
    assert not second.enter()
    unmapper.close(SECONDS)
    assert "their ends would not be noticed" in caplog.text
