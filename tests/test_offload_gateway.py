"""The process that holds the store's client: what its library does to a process is done to that one, and never to ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_cases import Cache, Node, get, prompt
from mooncake_cases import Depot, depot, needs_mooncake, new_names, own_depot
from offload_cases import LENGTH, engine, nodes, through
from processes import SECONDS, eventually

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import ConfigError
from vcache_backend.offload.gateway import NICENESS
from vcache_backend.offload.isolated import IsolatedStore
from vcache_backend.offload.staging import Ring
from vcache_backend.offload.store import Put, Span, StoreDown

__all__ = ["depot", "nodes", "own_depot"]
pytestmark = needs_mooncake

SIZE = 1 << 16


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(SIZE, 8, pinned=False)
    yield made
    made.close()


def opened(config: OffloadConfig, ring: Ring) -> IsolatedStore:
    made = IsolatedStore(config)
    made.register(ring.span, ring.fd)
    made.open()
    return made


def niceness(pid: int) -> list[int]:
    """Of each thread of a process."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [int(stat.rpartition(")")[2].split()[16]) for stat in stats]


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_bytes_go_through_shared_memory(depot: Depot, ring: Ring) -> None:
    store = opened(depot.offload(), ring)
    names, (one, two) = new_names(2), ring.take(2, 0)
    one.memory.numpy()[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    assert store.put(names, [one.span(SIZE), one.span(100)]) == [Put.STORED, Put.STORED]
    assert store.contains_prefix([*names, "vcache1/absent"]) == 2
    assert store.get_into([names[1], names[0], "vcache1/absent"], [one.span(SIZE), two.span(SIZE), one.span(8)]) == [100, SIZE, 0]
    assert np.array_equal(two.memory.numpy(), np.arange(SIZE, dtype=np.uint32).astype(np.uint8))
    store.remove(names)
    assert store.contains_prefix(names) == 0
    pid = store.pid
    assert pid is not None
    assert store.close(0.0)
    eventually(lambda: ended(pid))
    with pytest.raises(StoreDown, match="closed"):
        store.contains_prefix(names)


def test_only_the_threads_that_wait_for_bytes_step_back(depot: Depot, ring: Ring) -> None:
    """The library spins in them, and moves the bytes in others."""
    store = opened(depot.offload(), ring)
    assert store.pid is not None
    ours = os.nice(0)
    before = niceness(store.pid)
    assert set(before) == {ours}
    (buffer,), names = ring.take(1, 0), new_names(1)
    store.put(names, [buffer.span(SIZE)])
    assert store.get_into(names, [buffer.span(SIZE)]) == [SIZE]
    after = niceness(store.pid)
    stepped_back = [nice for nice in after if nice != ours]
    assert 1 <= len(stepped_back) <= 2
    assert set(stepped_back) == {min(ours + NICENESS, 19)}
    assert len(after) >= len(before) + len(stepped_back)
    store.close(0.0)


def test_only_registered_memory_is_touched(depot: Depot, ring: Ring) -> None:
    store = opened(depot.offload(), ring)
    other = np.zeros(SIZE, np.uint8)
    with pytest.raises(StoreDown, match="not in registered memory"):
        store.get_into(new_names(1), [Span(other.ctypes.data, SIZE)])
    past = Span(ring.span.address + ring.span.nbytes - 10, 11)
    with pytest.raises(StoreDown, match="not in registered memory"):
        store.put(new_names(1), [past])
    store.close(0.0)


def test_opening_while_the_master_hangs_leaves_the_interpreter_free(own_depot: Depot, ring: Ring) -> None:
    """In one process with us, the library keeps the interpreter's lock for all that time."""
    own_depot.master.stop()
    store = IsolatedStore(own_depot.offload())
    errors: list[Exception] = []

    def open_it() -> None:
        try:
            store.open()
        except StoreDown as error:
            errors.append(error)

    opening = threading.Thread(target=open_it)
    began = last = time.perf_counter()
    worst = 0.0
    opening.start()
    while opening.is_alive():
        time.sleep(0.001)
        worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
    assert len(errors) == 1
    assert worst < (time.perf_counter() - began) / 2
    store.close(0.0)


def test_a_killed_gateway_is_a_miss_and_starts_again(nodes: list[Node], depot: Depot, request: pytest.FixtureRequest) -> None:
    one, two = (engine(at, depot, request.node.nodeid) for at in nodes)
    cache, tokens = Cache(), prompt(LENGTH)
    through(one, cache, tokens)
    pid = two.get_stats()["offload"]["store"]["gateway"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not two.get_stats()["offload"]["usable"])
    assert two.lookup(tokens) == 0
    eventually(lambda: two.get_stats()["offload"]["usable"])
    assert two.get_stats()["offload"]["store"]["gateway"] != pid
    eventually(lambda: two.lookup(tokens) == LENGTH)
    assert get(two, cache, tokens) == LENGTH


def test_a_call_that_hangs_ends_with_its_process(own_depot: Depot, ring: Ring) -> None:
    """A provider hangs in the middle: the library would read on for half a minute. Once the call has failed nobody writes the buffer."""
    store = opened(own_depot.offload(call_seconds=0.5), ring)
    names, (buffer,) = new_names(1), ring.take(1, 0)
    assert store.put(names, [buffer.span(SIZE)]) == [Put.STORED]
    own_depot.providers[0].stop()
    pid = store.pid
    assert pid is not None
    with pytest.raises(StoreDown, match="killed"):
        store.get_into(names, [buffer.span(SIZE)])
    assert ended(pid)
    assert not store.is_open
    own_depot.providers[0].cont()
    store.open()
    assert store.get_into(names, [buffer.span(SIZE)]) == [SIZE]
    store.close(0.0)


def test_calls_under_way_fail_when_it_dies(own_depot: Depot, ring: Ring) -> None:
    store = opened(own_depot.offload(), ring)
    names, (buffer,) = new_names(1), ring.take(1, 0)
    store.put(names, [buffer.span(SIZE)])
    own_depot.providers[0].stop()
    errors: list[Exception] = []

    def read() -> None:
        try:
            store.get_into(names, [buffer.span(SIZE)])
        except StoreDown as error:
            errors.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(0.2)
    pid = store.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    reading.join(SECONDS)
    assert len(errors) == 1
    store.close(0.0)


def test_it_ends_with_its_parent(own_depot: Depot, tmp_path: Path) -> None:
    """Also with one that is killed during a call which hangs."""
    code = f"""
import sys
from vcache_backend.config import OffloadConfig, MooncakeConfig
from vcache_backend.offload.gateway import NICENESS
from vcache_backend.offload.isolated import IsolatedStore
from vcache_backend.offload.staging import Ring
store = IsolatedStore(OffloadConfig(mooncake=MooncakeConfig(master={own_depot.master.address!r}, hostname="127.0.0.1")))
ring = Ring(65536, 2, pinned=False)
store.register(ring.span, ring.fd)
store.open()
names, (buffer,) = ['vcache1/a'], ring.take(1, 0)
store.put(names, [buffer.span(65536)])
print(store.pid, flush=True)
sys.stdin.readline()
store.get_into(names, [buffer.span(65536)])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        own_depot.providers[0].stop()
        parent.stdin.write("\n")
        parent.stdin.flush()
        time.sleep(0.2)
        parent.kill()
    eventually(lambda: ended(pid))


def test_a_forked_child_gets_nothing_and_leaves_it_alone(depot: Depot, ring: Ring) -> None:
    store = opened(depot.offload(), ring)
    names, (buffer,) = new_names(1), ring.take(1, 0)
    store.put(names, [buffer.span(SIZE)])
    child = os.fork()
    if child == 0:
        try:
            store.contains_prefix(names)
        except StoreDown:
            os._exit(0 if not store.is_open and store.close(0.0) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.contains_prefix(names) == 1
    store.close(0.0)


def test_a_library_that_does_not_load_is_said_once(ring: Ring, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    store = IsolatedStore(OffloadConfig(policy="write_through"))
    with pytest.raises(ConfigError, match="does not load"):
        store.open()
    store.close(0.0)
