"""A Mooncake store while things fail around it: nothing crashes, nothing waits without end, nothing is said to be stored that is not.

Each test is a process with a master and providers of its own, so that a segmentation fault in it is a failed test; all of them start
together, since most of their time is waiting. Times are upper bounds that the store promises, with room for a slow machine.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mooncake_cases import MIB, Depot, Memory, needs_mooncake, new_names
from processes import Child, eventually

from vcache_backend.config import MooncakeConfig
from vcache_backend.offload.mooncake import MooncakeStore, State
from vcache_backend.offload.store import Put, StoreDown

pytestmark = [needs_mooncake, pytest.mark.timeout(120)]

RPC_SECONDS = 0.5
SECONDS = 90.0
"""Until a process must have ended."""
STATUS: dict[str, int] = {}


def apart(status: int = 0) -> Callable[[Callable[[Path], None]], Callable[[dict[str, Child]], None]]:
    """The test runs in a process of its own, which must end with `status`."""

    def make(body: Callable[[Path], None]) -> Callable[[dict[str, Child]], None]:
        def test(running: dict[str, Child]) -> None:
            got, said = running[body.__name__].wait(SECONDS)
            assert got == status, f"exit status {got}:\n{said}"

        test.__doc__ = body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return make


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Child]]:
    """The processes of the tests that were asked for, by name."""
    wanted = [item.name for item in request.session.items if item.fspath == request.path]
    with ExitStack() as undo:
        folder = tmp_path_factory.mktemp("mooncake_failures")
        yield {name: undo.enter_context(Child([sys.executable, __file__, name, str(folder / name)])) for name in wanted}


# ---- inside


def opened(depot: Depot, **more: Any) -> MooncakeStore:
    store = MooncakeStore(depot.config(**({"rpc_seconds": RPC_SECONDS} | more)))
    store.open()
    return store


def down(call: Callable[[], Any], seconds: float) -> None:
    """`call` raises StoreDown, within `seconds`."""
    start = time.monotonic()
    with pytest.raises(StoreDown):
        call()
    assert time.monotonic() - start < seconds


def calls(store: MooncakeStore, name: str) -> list[Callable[[], Any]]:
    memory = Memory(4096)
    return [
        lambda: store.contains_prefix([name]),
        lambda: store.get_into([name], [memory.span]),
        lambda: store.put([name], [memory.span]),
        lambda: store.remove([name]),
    ]


def fill(store: MooncakeStore, count: int = 1, nbytes: int = MIB) -> tuple[list[str], Memory]:
    names, memory = new_names(count), Memory(secrets.token_bytes(nbytes))
    assert store.put(names, [memory.span] * count) == [Put.STORED] * count
    return names, memory


class Getting:
    """A get under way, in a thread."""

    def __init__(self, store: MooncakeStore, name: str, nbytes: int) -> None:
        self.memory = Memory(nbytes)
        self.answer: list[int] | StoreDown | None = None
        self._thread = threading.Thread(target=self._run, args=(store, name), daemon=True)
        self._thread.start()
        eventually(lambda: store.stats()["calls_under_way"] or not self._thread.is_alive())

    def _run(self, store: MooncakeStore, name: str) -> None:
        try:
            self.answer = store.get_into([name], [self.memory.span])
        except StoreDown as error:
            self.answer = error

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()


# ---- the master


@apart()
def test_an_absent_master_is_told_in_time_and_found_when_it_comes(folder: Path) -> None:
    with Depot(folder, ()) as depot:
        depot.master.kill()
        store = MooncakeStore(depot.config(rpc_seconds=RPC_SECONDS))
        down(store.open, 15)
        assert store.state is State.BROKEN
        for call in calls(store, "x"):
            down(call, 0.5)
        depot.master.restart()
        depot.lend(16 * MIB)
        store.open()
        fill(store)


@apart()
def test_a_killed_master_costs_one_call_and_its_successor_knows_nothing(folder: Path) -> None:
    with Depot(folder) as depot:
        store = opened(depot)
        names, memory = fill(store, 2)
        depot.master.kill()
        down(lambda: store.contains_prefix(names), 15)
        assert not store.is_open
        for call in calls(store, names[0]):
            down(call, 0.5)
        depot.master.restart()
        eventually(depot.master.segments)
        store.open()
        assert store.contains_prefix(names) == 0
        assert store.get_into(names[:1], [memory.span]) == [0]
        fill(store)


@apart()
def test_opening_and_closing_without_a_master_stop_no_other_thread(folder: Path) -> None:
    """The library's own setup and close would, for seconds: they keep Python's lock."""
    with Depot(folder) as depot:
        store, waiting = opened(depot, rpc_seconds=2), MooncakeStore(depot.config(rpc_seconds=2))
        longest, stop = 0.0, threading.Event()

        def watch() -> None:
            nonlocal longest
            while not stop.is_set():
                start = time.monotonic()
                time.sleep(0.01)
                longest = max(longest, time.monotonic() - start)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        depot.master.stop()
        down(waiting.open, 5)
        depot.master.kill()
        down(lambda: store.contains_prefix(["x"]), 15)
        for one in (waiting, store, store):
            down(one.open, 5)
        assert store.close(1)
        stop.set()
        watcher.join(5)
        assert longest < 0.9


@apart()
def test_with_the_master_killed_it_closes_and_the_process_ends(folder: Path) -> None:
    """The library's own close takes 13 s then."""
    with Depot(folder) as depot:
        store = opened(depot)
        depot.master.kill()
        down(lambda: store.contains_prefix(["x"]), 15)
        start = time.monotonic()
        assert store.close(0.5)
        assert time.monotonic() - start < 5
        signal.alarm(30)


@apart()
def test_a_hung_master_costs_rpc_seconds_and_then_all_is_well(folder: Path) -> None:
    with Depot(folder) as depot:
        store = opened(depot)
        names, memory = fill(store)
        depot.master.stop()
        for call in calls(store, "x"):
            down(call, 5)
        down(MooncakeStore(depot.config(rpc_seconds=RPC_SECONDS)).open, 10)
        depot.master.cont()
        target = Memory(MIB)
        assert eventually(lambda: store.contains_prefix(names)) == 1
        assert store.get_into(names, [target.span]) == [MIB]
        assert target.read() == memory.read()


@apart()
def test_a_put_that_was_late_is_not_stored_because_a_second_one_is_said_to_be(folder: Path) -> None:
    """The master reads the first put's request when it goes on, and holds its place; to further ones it says 0, and stores nothing."""
    with Depot(folder, put_start_discard_timeout_sec=3) as depot:
        store = opened(depot)
        names, memory = new_names(2), Memory(secrets.token_bytes(4096))
        depot.master.stop()
        down(lambda: store.put(names[:1], [memory.span]), 5)
        depot.master.cont()
        fill(store)
        assert store.contains_prefix(names[:1]) == 0
        assert store.put(names, [memory.span] * 2) == [Put.FAILED, Put.STORED]

        def again() -> bool:
            return store.put(names[:1], [memory.span]) == [Put.STORED]

        eventually(again)
        target = Memory(4096)
        assert store.get_into(names[:1], [target.span]) == [4096]
        assert target.read() == memory.read()


# ---- providers


@apart()
def test_what_a_killed_provider_had_is_a_miss(folder: Path) -> None:
    """The master says for `client_ttl` that it is there."""
    with Depot(folder, client_ttl=3) as depot:
        store = opened(depot)
        names, memory = fill(store, 2)
        depot.providers[0].kill()
        down(lambda: store.get_into(names, [memory.span] * 2), 10)
        assert store.is_open
        eventually(depot.providers[0].gone)
        assert store.contains_prefix(names) == 0
        assert store.get_into(names, [memory.span] * 2) == [0, 0]
        assert store.put(new_names(1), [memory.span]) == [Put.FULL]
        depot.lend(16 * MIB)
        fill(store)


@apart()
def test_one_of_two_providers_killed_leaves_the_others_objects(folder: Path) -> None:
    with Depot(folder, (64 * MIB, 64 * MIB)) as depot:
        store = opened(depot)
        names, memory = fill(store, 24)
        depot.providers[0].kill()
        targets = [Memory(MIB) for _ in names]
        sizes = store.get_into(names, [target.span for target in targets])
        assert set(sizes) == {0, MIB}
        assert all(target.read() == memory.read() for target, size in zip(targets, sizes, strict=True) if size)


@apart()
def test_a_hung_provider_is_waited_for_only_so_long(folder: Path) -> None:
    with Depot(folder, client_ttl=60) as depot:
        store = opened(depot)
        names, memory = fill(store)
        depot.providers[0].stop()
        target = Memory(MIB)
        down(lambda: store.get_into(names, [target.span]), 15)
        down(lambda: store.put(new_names(1), [memory.span]), 15)
        assert store.contains_prefix(names) == 1
        depot.providers[0].cont()
        assert store.get_into(names, [target.span]) == [MIB]
        assert target.read() == memory.read()


@apart()
def test_closing_does_not_wait_for_a_hung_provider_and_says_whose_memory_is_in_use(folder: Path) -> None:
    with Depot(folder, client_ttl=60) as depot:
        store = opened(depot)
        names, _ = fill(store)
        depot.providers[0].stop()
        getting = Getting(store, names[0], MIB)
        start = time.monotonic()
        assert not store.close(0.2)
        assert time.monotonic() - start < 5
        down(lambda: store.contains_prefix(names), 0.5)
        getting.join(15)
        assert isinstance(getting.answer, StoreDown)
        assert store.close(10)


@apart(status=3)
def test_a_process_with_a_call_that_hangs_ends_with_its_own_status(folder: Path) -> None:
    """Whatever the library does at exit frees the client that is in the call."""
    depot = Depot(folder, client_ttl=60)
    store = opened(depot, rpc_seconds=50)
    names, _ = fill(store)
    depot.providers[0].stop()
    Getting(store, names[0], MIB)
    assert not store.close(0)
    signal.alarm(15)
    sys.exit(3)


# ---- our own process


@apart()
def test_close_waits_for_a_transfer(folder: Path) -> None:
    with Depot(folder, (256 * MIB,)) as depot:
        store = opened(depot)
        names, memory = fill(store, 1, 128 * MIB)
        getting = Getting(store, names[0], 128 * MIB)
        assert store.close(30)
        getting.join(1)
        assert getting.answer == [128 * MIB]
        assert getting.memory.read() == memory.read()


@apart()
def test_threads_that_call_while_it_closes_and_opens_see_it_open_or_down(folder: Path) -> None:
    with Depot(folder) as depot:
        store = opened(depot)
        names, memory = fill(store, 4)
        stop, wrong = threading.Event(), []

        def read() -> None:
            target = Memory(MIB)
            while not stop.is_set():
                try:
                    if store.get_into(names[:1], [target.span]) != [MIB] or target.read() != memory.read():
                        wrong.append(1)
                except StoreDown:
                    time.sleep(0.001)

        readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        for _ in range(8):
            time.sleep(0.05)
            assert store.close(0.5)
            store.open()
        stop.set()
        for reader in readers:
            reader.join(10)
        assert not wrong


@apart()
def test_in_a_forked_child_calls_raise_at_once_and_the_parent_goes_on(folder: Path) -> None:
    with Depot(folder) as depot:
        store = opened(depot)
        names, _ = fill(store)
        pid = os.fork()
        if pid == 0:
            signal.alarm(15)
            for call in [*calls(store, names[0]), store.open, MooncakeStore(depot.config()).open]:
                down(call, 1)
            assert not store.is_open
            assert store.close(5)
            del store
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert store.contains_prefix(names) == 1
        fill(store)


@apart()
def test_a_process_that_forgets_to_close_ends(folder: Path) -> None:
    with Depot(folder) as depot:
        fill(opened(depot))
        MooncakeStore(MooncakeConfig(master="127.0.0.1:1"))
        signal.alarm(30)


@apart()
def test_a_process_ends_while_a_store_opens(folder: Path) -> None:
    depot = Depot(folder, ())
    store = MooncakeStore(depot.config(rpc_seconds=10))
    depot.master.stop()
    threading.Thread(target=down, args=(store.open, 20), daemon=True).start()
    eventually(lambda: store.state is State.OPENING)
    down(store.open, 0.5)
    assert store.close(0)
    signal.alarm(15)


@apart()
def test_signals_still_reach_the_process(folder: Path) -> None:
    """The library has a thread that waits for SIGINT and SIGTERM, to end the process."""
    with Depot(folder) as depot:
        store = opened(depot)
        fill(store)
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: heard)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        assert Child(["/bin/sh", "-c", "kill -TERM $$; sleep 20"]).wait(5)[0] == -signal.SIGTERM
        fill(store)


if __name__ == "__main__":
    globals()[sys.argv[1]].body(Path(sys.argv[2]))
