"""The store while its master, its providers and the offload process fail."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from mooncake_cases import Raw, depot, hung_depot, needs_mooncake, new_names, own_depot
from mooncake_store import Depot
from processes import SECONDS, eventually
from soak.forked import stopped

from vcache_backend.config import OffloadConfig
from vcache_backend.offload.process import FAILED, STORED, Place, StoreDown
from vcache_backend.offload.store import Store
from vcache_backend.offload.transfers import Buffer, staging
from vcache_backend.transfer.stats import EngineStats

__all__ = ["depot", "hung_depot", "own_depot"]


pytestmark = needs_mooncake


SIZE = 1 << 16


QUICK: dict[str, Any] = {"retry_seconds": 0.05, "lookup_seconds": 10.0}


def opened(config: OffloadConfig) -> tuple[Store, list[Buffer]]:
    """A store that is usable, with four buffers."""
    made = Store(config, EngineStats())
    made.wait(SECONDS)
    assert made.usable
    return made, staging(made.memory, SIZE, 4, None)


def places(*buffers: Buffer) -> list[Place]:
    return [buffer.place for buffer in buffers]


def pid(store: Store) -> int:
    return int(store.snapshot()["process"])


def gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


# ---- the master fails


def test_an_absent_master_is_found_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vcache_backend.offload.store")
    with Depot(tmp_path, ()) as depot:
        depot.master.kill()
        store = Store(depot.offload(**QUICK), EngineStats())
        eventually(lambda: "Connection refused" in store.snapshot()["last_error"])
        assert not store.usable
        assert store.lookup(["x"]) is None
        assert (store.get(["x"], [(0, 1)]), store.put(["x"], [(0, 1)])) == ([-1], [FAILED])
        depot.master.restart()
        eventually(lambda: store.usable)
        # Said once, though tried again and again; then what is in force.
        assert sum("Connection refused" in message for message in caplog.messages) == 1
        address = f"master_server_addr={depot.master.address}"
        in_force = next(message for message in caplog.messages if address in message)
        assert "MC_RPC_TIMEOUT_MS=" in in_force
        store.close()


def test_a_hung_master_is_left_alone_and_all_is_well_when_it_goes_on(own_depot: Depot) -> None:
    config = own_depot.offload(failures=1, mooncake={"rpc_seconds": 2.0}, **QUICK)
    store, (buffer, *_) = opened(config)
    names = new_names(1)
    assert store.put(names, places(buffer)) == [STORED]
    process = pid(store)
    own_depot.master.stop()
    assert store.lookup(names) is None
    assert not store.usable
    hasty = own_depot.config(rpc_seconds=0.5)
    with pytest.raises(StoreDown, match="no answer from the master"), Raw(hasty):
        pass
    own_depot.master.cont()
    eventually(lambda: store.lookup(names) == 1)
    assert pid(store) == process
    store.close()


def test_a_call_that_hangs_ends_with_its_process(hung_depot: Depot) -> None:
    """A provider hangs in the middle: the library would read on for half a minute. Once the call
    has failed nobody writes the buffer, and those under way beside it have failed, too."""
    store, (buffer, other, *_) = opened(hung_depot.offload(call_seconds=1.5, **QUICK))
    names, beside = new_names(1), list[list[int]]()
    assert store.put(names, places(buffer)) == [STORED]
    process = pid(store)
    hung_depot.providers[0].stop()
    reading = threading.Thread(target=lambda: beside.append(store.get(names, places(other))))
    reading.start()
    assert store.get(names, places(buffer)) == [-1]
    assert gone(process)
    reading.join(SECONDS)
    assert beside == [[-1]]
    hung_depot.providers[0].cont()
    eventually(lambda: store.usable)
    assert store.get(names, places(buffer)) == [SIZE]
    store.close()


def test_look_ups_and_removals_do_not_wait_for_transfers(hung_depot: Depot) -> None:
    """Also more transfers than there are threads for them in the tier. The library gives them up
    after eleven seconds.
    """
    (store, buffers) = opened(hung_depot.offload(mooncake={"rpc_seconds": 10}, **QUICK))
    names = new_names(2)
    assert store.put(names, places(*buffers[:2])) == [STORED] * 2
    hung_depot.providers[0].stop()
    given = [(names[:1], places(buffer)) for buffer in buffers]
    reading = [threading.Thread(target=store.get, args=one) for one in given]
    for thread in reading:
        thread.start()
    assert store.lookup(names) == 2
    store.forget(names[1])
    eventually(lambda: store.lookup(names) == 1)
    assert all(thread.is_alive() for thread in reading)
    hung_depot.providers[0].cont()
    for thread in reading:
        thread.join(SECONDS)
    store.close()


# ---- the process fails


def stop(process: int) -> None:
    """It answers nothing from now on: others of its threads run on for a while behind the signal."""
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: stopped(process))


def test_a_process_that_stops_costs_look_ups_a_deadline(depot: Depot) -> None:
    store, _ = opened(depot.offload(failures=3, **(QUICK | {"lookup_seconds": 0.1})))
    stop(pid(store))
    assert (store.lookup(["x"]), store.usable) == (None, True)
    assert (store.lookup(["x"]), store.lookup(["x"]), store.usable) == (None, None, False)
    assert store.snapshot()["last_error"] == "no answer in 0.1 s"
    os.kill(pid(store), signal.SIGCONT)
    eventually(lambda: store.usable)
    eventually(lambda: store.lookup(["vcache1/x"]) == 0)
    store.close()


def test_look_ups_of_several_threads_do_not_fail_each_other(depot: Depot) -> None:
    store, _ = opened(depot.offload(failures=1, **QUICK))
    stop(pid(store))
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(store.lookup, ["vcache1/x"]) for _ in range(4)]
        assert not wait(asked, 0.5, FIRST_COMPLETED).done
        os.kill(pid(store), signal.SIGCONT)
    assert [one.result() for one in asked] == [0] * 4
    store.close()


def test_a_killed_process_is_started_again(depot: Depot) -> None:
    store, (buffer, *_) = opened(depot.offload(**QUICK))
    names, process = new_names(1), pid(store)
    buffer.memory.fill_(7)
    assert store.put(names, places(buffer)) == [STORED]
    os.kill(process, signal.SIGKILL)
    eventually(lambda: store.snapshot()["process"] not in (process, None) and store.usable)
    buffer.memory.fill_(0)
    # It knows the memory, too.
    assert store.get(names, places(buffer)) == [SIZE]
    assert int(buffer.memory.sum()) == 7 * SIZE
    process = pid(store)
    store.close()
    eventually(lambda: gone(process))
    assert store.lookup(names) is None


def test_a_forked_child_gets_nothing_and_leaves_it_alone(depot: Depot) -> None:
    store, (buffer, *_) = opened(depot.offload(**QUICK))
    names = new_names(1)
    store.put(names, places(buffer))
    child = os.fork()
    if child == 0:
        nothing = (store.usable, store.lookup(names), store.get(names, places(buffer)))
        store.close()
        os._exit(0 if nothing == (False, None, [-1]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.lookup(names) == 1
    store.close()
