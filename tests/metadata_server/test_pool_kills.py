"""The pool among real processes: the server and writers are killed at random, processes are stopped
and go on, and readers compare every byte that they believe.

`SLOT_SOAK_SECONDS=300` makes a soak of it; it prints what it counted (`pytest -s`)."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from processes import eventually, make_memfd
from slot_pool_cases import SEGMENTS, Counts, connected, serve, work

SECONDS = float(os.environ.get("SLOT_SOAK_SECONDS", "6"))
WRITERS, READERS = 3, 3
ENOUGH = 50


class Campaign:
    """A server, writers and readers, and what happens to them. One more client keeps the tables,
    so that no kill is the end of the memory."""

    def __init__(self, path: Path, odds: float = 0.0, control: str = "") -> None:
        self.path, self._odds, self._control = str(path), odds, control
        self.fds = [make_memfd(4096), *map(make_memfd, SEGMENTS.values())]
        self.counts = Counts(self.fds[0], 0)
        self.kills = self.deaths = self.stops = self.rows = 0
        self.server = self._serve()
        tables: dict[str, int] = {}
        with connected(self.path, dict(zip(SEGMENTS, self.fds[1:], strict=True)), tables):
            eventually(lambda: len(tables) == len(SEGMENTS))
        self.fds += [tables[name] for name in SEGMENTS]
        self.clients = [self._start(role) for role in ["write"] * WRITERS + ["read"] * READERS]

    def _serve(self) -> BaseProcess:
        return self._fork(serve, self.path, self._odds, self._control)

    def _start(self, role: str) -> tuple[str, BaseProcess]:
        self.rows += 1
        check = self._control != "check"
        return role, self._fork(work, role, self.path, self.fds, 1 + self.rows % 60, check)

    def _fork(self, what: Callable[..., None], *arguments: object) -> BaseProcess:
        process = multiprocessing.get_context("fork").Process(
            target=_dies_with_us, args=(what, *arguments)
        )
        process.daemon = True
        process.start()
        return process

    def step(self, chance: random.Random) -> None:
        """One thing that happens to a process."""
        what = chance.random()
        at = chance.randrange(len(self.clients))
        role, client = self.clients[at]
        assert role == "write" or client.is_alive(), "a reader ended"
        if not self.server.is_alive():
            self.deaths += 1  # at a store to a table
            self.server = self._serve()
        elif what < 0.3:
            self.kills += 1
            self.server.kill()
            self.server.join()
            self.server = self._serve()
        elif what < 0.5 and role == "write":
            self.kills += 1
            client.kill()
            client.join()
            self.clients[at] = self._start(role)
        else:
            self.stops += 1
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(chance.random() * 0.2)
            os.kill(client.pid, signal.SIGCONT)

    def close(self) -> None:
        for process in [self.server, *(client for _, client in self.clients)]:
            process.kill()
            process.join()
        for fd in self.fds:
            os.close(fd)


def _dies_with_us(what: Callable[..., None], *arguments: object) -> None:
    """In the fork: whoever kills the tests leaves none of it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    what(*arguments)


@contextmanager
def campaign(path: Path, odds: float = 0.0, control: str = "") -> Iterator[Campaign]:
    made = Campaign(path / "pool.sock", odds, control)
    try:
        yield made
    finally:
        made.close()


def run(made: Campaign, seconds: float, until: str) -> dict[str, int]:
    """At least so long, and until there are `ENOUGH` of these."""
    chance, begun = random.Random(7), time.monotonic()
    while time.monotonic() - begun < seconds or made.counts.sums()[until] < ENOUGH:
        assert time.monotonic() - begun < seconds + 200, made.counts.sums()
        made.step(chance)
        time.sleep(0.3)
    sums = made.counts.sums() | {"kills": made.kills, "deaths": made.deaths, "stops": made.stops}
    print(f"\n{time.monotonic() - begun:.0f} s: {sums}")
    return sums


@pytest.mark.timeout(SECONDS + 280)
def test_a_reader_believes_no_wrong_byte_whoever_is_killed(tmp_path: Path) -> None:
    with campaign(tmp_path, odds=2e-5) as made:
        sums = run(made, SECONDS, "caught")
    assert sums["wrong"] == 0
    assert sums["believed"]
    assert sums["kills"]


@pytest.mark.parametrize("control", ["check", "quarantine"])
def test_without_generations_or_quarantine_readers_believe_wrong_bytes(
    tmp_path: Path, control: str
) -> None:
    with campaign(tmp_path, control=control) as made:
        assert run(made, 0.0, "wrong")["wrong"]
