"""Pins: what a reader counts on is not handed out, whoever is faster, stops or dies. Real
processes, real memory, a real server.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_cases import Sizes
from neighbour_cases import OwnerPart, instance
from processes import IN_A_CONTAINER, PATIENT, Apart, Stage, Worker, containers, eventually, nursery
from processes import stage as stage_at

from benchmarks.inplace_instance import BlockPool
from vcache_backend.errors import Refused
from vcache_backend.integration.vllm.resident_pool import ResidentPool
from vcache_backend.metadata_server.client import Client
from vcache_backend.resident import generations, pins
from vcache_backend.resident.generations import Generations, GenerationView
from vcache_backend.resident.pins import HOLD_SECONDS, SHARE, Pinning, Pins
from vcache_backend.resident.tables import Tables
from vcache_backend.seals import RESIZING

pytestmark = pytest.mark.skipif(not pins.possible(), reason="the kernel has no membarrier")
ONE = instance(1)
BLOCKS = 64
SIZES = Sizes(blocks=BLOCKS)
READS = 100
"""Trusted pins of one turn of a reader."""
BRIEFLY, A_WHILE, LONG = 0.02, 1.0, 60.0
"""How long a pin holds: where there are many, so that not all blocks are pinned; where a test waits
for its end; and where one asks what becomes of them."""


TRUSTING = msgspec.structs.replace(PATIENT, server_uid=0)


class Owner(OwnerPart):
    """Hands its blocks out, as vLLM does."""

    def __init__(self, path: Path, honest: bool = True, hold: float = HOLD_SECONDS) -> None:
        pins._HOLD = int(hold * 1e9)
        super().__init__(path, TRUSTING, ONE, sizes=SIZES)
        self.pool = BlockPool(BLOCKS)
        if not honest:
            self.pins.on = lambda blocks: None  # type: ignore[method-assign]
        self.watch = ResidentPool(self.pool, self.table, lambda: None, self.pins)
        self.fill(BLOCKS)

    def fill(self, count: int) -> list[int]:
        """One request that is computed and over: its blocks, in the order in which they are
        free.
        """
        blocks = [block.block_id for block in self.pool.get_new_blocks(count)]
        self.table.filled(blocks)
        self.pool.free_blocks(blocks)
        return blocks

    def takes(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def counted(self) -> tuple[int, int]:
        return self.watch.kept, self.watch.forced

    def pinned(self) -> list[int]:
        found = self.pins.on(np.arange(BLOCKS))
        return [] if found is None else np.flatnonzero(found).tolist()

    def reset(self) -> int:
        """When it was over."""
        self.pool.reset_prefix_cache()
        return time.monotonic_ns()


class Reader:
    """Pins blocks of the owner. looks: whether it looks at the generations once it has."""

    def __init__(self, path: Path, looks: bool = True, hold: float = HOLD_SECONDS) -> None:
        pins._HOLD = pins._LATE = int(hold * 1e9)
        client = Client(path, TRUSTING)
        self.tables = Tables(client)
        self.pinning = Pinning(client, self.tables)
        if not looks:
            GenerationView.pinned = lambda *_: True  # type: ignore[method-assign]
        self.view: GenerationView = eventually(lambda: self.tables.view(ONE))

    def pin(self, blocks: list[int], published: list[int] | None = None, name: str = "it") -> bool:
        """published: the generations; as they are now otherwise."""
        numbers = np.array(blocks, dtype=np.uint32)
        now = np.array(published, dtype=np.uint64) if published else self.view.counters[numbers]
        return self.pinning.pin(name, [(ONE, numbers, now)])

    def holds(self, blocks: list[int]) -> bool:
        """What it held when it was first asked."""
        numbers = np.array(blocks, dtype=np.uint32)
        self.known = getattr(self, "known", self.view.counters[numbers])
        return self.view.leading(numbers, self.known, len(blocks)) == 1

    def release(self, name: str = "it") -> None:
        self.pinning.release([name])

    def read(self) -> tuple[int, int]:
        """Pin some blocks after the other, and look for a moment what becomes of those that it
        counts on: how many times it did, and was wrong."""
        dice, trusted, wrong = random.Random(os.getpid()), 0, 0
        while trusted < READS:
            numbers = np.array(dice.sample(range(BLOCKS), 4), dtype=np.uint32)
            published = self.view.counters[numbers]
            if (published & np.uint64(1)).any() or not self.pinning.pin(
                "it", [(ONE, numbers, published)]
            ):
                continue
            trusted += 1
            until: int = self.pinning._held[-1][0]
            while (
                held := self.view.leading(numbers, published, 4)
            ) and time.monotonic_ns() < until:
                pass
            # Seen while it was still pinned, or it proves nothing.
            wrong += not held and time.monotonic_ns() < until
            if dice.random() < 0.5:
                self.pinning.release(["it"])
        return trusted, wrong


@contextmanager
def living(
    stage: Stage, kind: Any, *arguments: Any, apart: Apart | None = None
) -> Iterator[Worker]:
    with Worker(
        nursery("test_pins"), kind, stage.path, *arguments, name=kind.__name__, apart=apart
    ) as one:
        yield one.made()


# ---- one reader, one owner


def test_what_is_pinned_goes_behind_all_others(stage: Stage) -> None:
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        first = owner.ask("pinned")
        assert reader.ask("pin", [0, 2, 5])
        assert (first, owner.ask("pinned")) == ([], [0, 2, 5])
        assert owner.ask("takes", 6) == [1, 3, 4, 6, 7, 8]
        assert owner.ask("counted") == (3, 0)
        assert owner.ask("takes", BLOCKS - 9) == list(range(9, BLOCKS))


def test_who_lets_go_of_blocks_leaves_them_to_those_who_have_pinned_them_too(stage: Stage) -> None:
    with ExitStack() as undo:
        owner = undo.enter_context(living(stage, Owner, True, LONG))
        first, second = (undo.enter_context(living(stage, Reader, True, LONG)) for _ in range(2))
        assert first.ask("pin", [1, 2, 3])
        assert second.ask("pin", [3, 4])
        first.ask("release")
        assert owner.ask("pinned") == [3, 4]
        second.ask("release")
        assert owner.ask("pinned") == []
        assert first.ask("pin", [1, 2, 3])
        assert first.ask("pin", [3, 4], None, "another request")
        first.ask("release", "another request")
        assert owner.ask("pinned") == [1, 2, 3]


def test_who_cannot_count_on_blocks_does_not_leave_them_pinned(stage: Stage) -> None:
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        assert not reader.ask("pin", [1, 2], [2, 2])
        assert owner.ask("pinned") == []


def test_an_owner_that_has_nothing_else_takes_what_is_pinned(stage: Stage) -> None:
    """Its reader is stopped, and finds out by its verdict."""
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        before = reader.ask(_counters, [3, 4])
        assert reader.ask("pin", [3, 4])
        with reader.stopped():
            assert owner.ask("takes", BLOCKS) == [
                number for number in range(BLOCKS) if number not in (3, 4)
            ] + [3, 4]
        kept, forced = owner.ask("counted")
        assert kept >= forced == 2
        assert not reader.ask("pin", [3, 4], before)


def test_a_pin_ends_by_itself_when_its_reader_is_killed_or_stopped(stage: Stage) -> None:
    with (
        living(stage, Owner, True, A_WHILE) as owner,
        living(stage, Reader, True, A_WHILE) as killed,
        living(stage, Reader, True, A_WHILE) as stopped,
    ):
        assert killed.ask("pin", [1])
        assert stopped.ask("pin", [2])
        killed.kill()
        with stopped.stopped():
            eventually(lambda: owner.ask("pinned") == [])
            assert owner.ask("takes", 4) == [0, 1, 2, 3]
        assert owner.ask("counted") == (0, 0)


@pytest.mark.parametrize("blocks", [[1, 9], [7]], ids=["one of them", "the only one"])
def test_nothing_is_counted_on_that_is_not_as_it_was_published(
    stage: Stage, blocks: list[int]
) -> None:
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        before = reader.ask(_counters, blocks)
        assert reader.ask("pin", blocks, before)
        assert not reader.ask("pin", blocks, [*before[:-1], before[-1] + 2])
        owner.ask("takes", BLOCKS)
        assert not reader.ask("pin", blocks, before)
        assert not reader.ask("pin", blocks), "handed out, and not filled"


def test_a_reader_pins_an_eighth_of_an_owners_blocks_at_most(stage: Stage) -> None:
    with living(stage, Owner, True, LONG), living(stage, Reader, True, LONG) as reader:
        assert not reader.ask("pin", list(range(BLOCKS // SHARE + 1)))
        assert reader.ask("pin", list(range(BLOCKS // SHARE)))
        assert not reader.ask("pin", [BLOCKS - 1])
        reader.ask("release")
        assert reader.ask("pin", [BLOCKS - 1])


def test_of_an_owner_that_can_hand_out_little_little_is_pinned(stage: Stage) -> None:
    """Its next step would need what is pinned, and the reader's engine end: of 16 blocks that are
    free not 8 are pinned, but 2.
    """
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        owner.ask("takes", BLOCKS - 16)
        last = list(range(BLOCKS - 8, BLOCKS))
        assert not reader.ask("pin", last)
        assert reader.ask("pin", last[:2])
        assert owner.ask("takes", 14)
        assert owner.ask("counted")[1] == 0


def test_a_reset_waits_for_those_who_count_on_a_pin_and_nobody_does_meanwhile(stage: Stage) -> None:
    with (
        living(stage, Owner, True, A_WHILE) as owner,
        living(stage, Reader, True, A_WHILE) as reader,
        living(stage, Reader, True, A_WHILE) as late,
    ):
        assert late.ask("pin", [8])
        began = time.monotonic_ns()
        assert reader.ask("pin", [3])
        owner.tell("reset")
        eventually(lambda: not late.ask("pin", [8]))
        assert owner.answer() >= began + int(A_WHILE * 1e9)
        assert owner.ask("fill", BLOCKS)
        assert reader.ask("pin", [3]), "as before"


def test_nobody_counts_on_the_pins_of_an_owner_that_takes_none_or_by_another_clock(
    stage: Stage,
) -> None:
    with living(stage, Owner, True, LONG) as owner, living(stage, Reader, True, LONG) as reader:
        assert reader.ask("pin", [3])
        for clock in (0, 7):
            owner.ask(_clock, clock)
            assert not reader.ask("pin", [3])


@pytest.mark.skipif(
    os.getuid() != 0 or bool(containers()),
    reason=f"needs root and namespaces of its own: {containers()}",
)
@pytest.mark.parametrize("later", [0, 1000], ids=["", "of another time"])
def test_who_reads_from_another_container_pins_by_the_same_clock_alone(later: int) -> None:
    """Of another user, too. What cannot be pinned can be read: the generations know no time."""
    with TemporaryDirectory() as folder, stage_at(Path(folder) / "folder") as here:
        Path(folder).chmod(0o711)
        here.server(IN_A_CONTAINER, allow_gids=[4242])
        first, second = Apart(uid=1001, gid=4242), Apart(later, uid=1002, gid=4242)
        with (
            living(here, Owner, True, LONG, apart=first) as owner,
            living(here, Reader, True, LONG, apart=second) as reader,
        ):
            assert reader.ask("pin", [3]) == (not later)
            assert owner.ask("pinned") == ([] if later else [3])
            assert reader.ask("holds", [3])
            owner.ask("takes", BLOCKS - 1)
            assert reader.ask("holds", [3]) == (not later)


def test_a_time_that_no_reader_writes_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_HOLD", int(LONG * 1e9))
    table = Generations(ONE, BLOCKS)
    board = Pins(table)
    now = time.monotonic_ns()
    for until in (now - 1, now + 10**12, -1, 1 << 62):
        board._board.until[0, 3] = board._board.last[0] = until
        assert board.on(np.arange(BLOCKS)) is None
    board._board.until[0, 4], board._board.last[1] = now + 10**10, 1 << 62
    found = board.on(np.arange(BLOCKS))
    assert found is not None
    assert np.flatnonzero(found).tolist() == [4]
    # Who closes waits for those that may still count on it.
    board._board.last[:] = 0
    for part in (board, table):
        part.close()


@pytest.mark.parametrize("kind", ["a pipe", "unsealed", "short"])
def test_what_is_no_memory_for_pins_is_not_written(stage: Stage, kind: str) -> None:
    """A mapping that shrinks would be a SIGBUS."""
    fd = os.pipe()[0] if kind == "a pipe" else os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    if kind != "a pipe":
        os.ftruncate(fd, pins.size(BLOCKS) - 4096 * (kind == "short"))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZING if kind == "short" else fcntl.F_SEAL_GROW)
    assert pins.misfit(fd, BLOCKS)
    with living(stage, Owner) as owner, living(stage, Reader) as reader:
        if kind == "short":
            owner.ask(_shows, os.getpid(), fd)
        else:
            with pytest.raises(AssertionError, match=r"is no memfd|is not sealed"):
                owner.ask(_shows, os.getpid(), fd)
            return
        assert not reader.ask("pin", [3])
    os.close(fd)


def test_an_instance_that_takes_no_pins_is_read_without(stage: Stage) -> None:
    with living(stage, Owner), stage.client() as client, pytest.raises(Refused, match="not here"):
        client.open_pins(instance(2))


# ---- many at once


def turns(
    stage: Stage, honest: bool, looks: bool, readers: int = 2, most: int = 20
) -> tuple[int, int, int]:
    """An owner and readers that do nothing else: how often a reader counted on a pin, and was
    wrong; and blocks that were kept. If it is to go wrong, until it does."""
    trusted = wrong = 0
    with ExitStack() as undo:
        owner = undo.enter_context(living(stage, Owner, honest, BRIEFLY))
        others = [undo.enter_context(living(stage, Reader, looks, BRIEFLY)) for _ in range(readers)]
        for _ in range(most):
            owner.tell(_work_a_while)
            for reader in others:
                reader.tell("read")
            for reader in others:
                its = reader.answer()
                trusted, wrong = trusted + its[0], wrong + its[1]
            owner.answer()
            if wrong or (honest and looks and owner.ask("counted")[0] > 100):
                break
        return trusted, wrong, owner.ask("counted")[0]


def test_no_block_that_a_reader_counts_on_is_handed_out(stage: Stage) -> None:
    trusted, wrong, kept = turns(stage, honest=True, looks=True)
    assert trusted >= 2 * READS
    assert kept > 100
    assert wrong == 0


@pytest.mark.parametrize(
    ("honest", "looks"),
    [(False, True), (True, False)],
    ids=["owner does not look", "reader does not"],
)
def test_without_either_look_blocks_are_handed_out_that_a_reader_counts_on(
    stage: Stage, honest: bool, looks: bool
) -> None:
    assert turns(stage, honest, looks)[1] > 0


def _work_a_while(owner: Owner) -> None:
    dice, until = random.Random(1), time.monotonic() + 1.5
    while time.monotonic() < until:
        owner.fill(dice.randint(1, BLOCKS // 4))


def _counters(reader: Reader, blocks: list[int]) -> list[int]:
    counters: list[int] = reader.view.counters[blocks].tolist()
    return counters


def _clock(owner: Owner, clock: int) -> None:
    struct.pack_into("<Q", owner.table._memory, generations._CLOCK_AT, clock)


def _shows(owner: Owner, pid: int, fd: int) -> None:
    fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)
    owner.client.show_pins(ONE, fd)
    os.close(fd)
