"""The offload process against a real master and real providers: what each verb answers, also while
things fail around it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from mooncake_cases import MIB, Raw, depot, hung_depot, needs_mooncake, new_names, own_depot, raw
from mooncake_store import Depot
from processes import SECONDS, Child, eventually

from vcache_backend.config import OffloadConfig
from vcache_backend.offload.process import FAILED, FULL, STORED, Place, StoreDown
from vcache_backend.offload.store import Store
from vcache_backend.offload.transfers import Buffer, staging
from vcache_backend.transfer.stats import EngineStats

__all__ = ["depot", "hung_depot", "own_depot", "raw"]
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


# ---- the verbs


def test_what_was_put_is_there_and_comes_back(raw: Raw) -> None:
    names, data = new_names(4), [secrets.token_bytes(size) for size in (1, 4097, 4 * MIB)]
    assert raw.there(names) == [False] * 4
    assert raw.put(names[:3], data) == [STORED] * 3
    # The first writer wins.
    assert raw.put(names[1:2], [secrets.token_bytes(4097)]) == [STORED]
    assert raw.there(names) == [True, True, True, False]
    assert raw.get(names, 4 * MIB) == [*data, b""]
    # Too small a place is left as it is.
    assert raw.get(names[1:2], 1024) == [b""]
    assert raw.memory[:1024] == bytes(1024)


def test_all_that_is_under_a_prefix_goes_and_nothing_else(depot: Depot, raw: Raw) -> None:
    """Also what was read just now, and what others wrote; a dot stands for itself."""
    (name,), data = new_names(1), secrets.token_bytes(100)
    start = f"{name}.b"
    mine, others = [f"{start}{i:02x}" for i in range(20)], [f"{name}xb", f"x{start}"]
    raw.put([*mine, *others], [data] * 22)
    raw.get(mine[:1])
    with Raw(depot.config()) as another:
        another.put([f"{start}ff"], [data])
    assert raw.call("remove_under", start) == 21
    assert raw.there([mine[0], *others]) == [False, True, True]
    assert raw.call("remove_under", start) == 0


def test_a_full_pool_says_so_and_has_nothing_of_what_it_did_not_take(tmp_path: Path) -> None:
    with Depot(tmp_path, (16 * MIB,)) as small, Raw(small.config(), 32 * MIB) as raw:
        names, data = new_names(6), secrets.token_bytes(4 * MIB)
        answers = raw.put(names, [data] * 6)
        assert set(answers) == {STORED, FULL}
        for answer, came in zip(answers, raw.get(names, 4 * MIB), strict=True):
            assert came in (b"", data)
            assert not came or answer == STORED
        # Larger than any segment, beside one that is not.
        assert raw.put(new_names(1), [bytes(17 * MIB)]) == [FULL]


def test_only_shared_memory_is_touched(raw: Raw) -> None:
    for place in ((16 * MIB - 10, 11), (-1, 1)):
        for verb in ("put", "get"):
            with pytest.raises(StoreDown, match="not in the shared memory"):
                raw.call(verb, new_names(1), [place])


def test_the_offload_process_takes_no_module_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depot: Depot
) -> None:
    """Anybody may have put one there, as in /tmp."""
    (tmp_path / "mooncake.py").write_text("raise RuntimeError('taken from the working folder')")
    monkeypatch.chdir(tmp_path)
    with Raw(depot.config()) as raw:
        assert raw.there(["x"]) == [False]


def test_calls_before_open_answer_and_do_not_crash(depot: Depot) -> None:
    """The library itself would end the process with a segmentation fault."""
    raw = Raw(depot.config())
    for verb, *given in (("exist",), ("put", [(0, 1)]), ("get", [(0, 1)]), ("remove",)):
        with pytest.raises(StoreDown, match="not open"):
            raw.call(verb, ["x"], *given)
    with raw:
        assert raw.there(["vcache1/x"]) == [False]


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
    config = own_depot.offload(failures=1, mooncake={"rpc_seconds": 0.5}, **QUICK)
    store, (buffer, *_) = opened(config)
    names = new_names(1)
    store.put(names, places(buffer))
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


# ---- providers fail


def test_what_a_killed_provider_had_is_a_miss(tmp_path: Path) -> None:
    """The master says for `client_ttl` that it is there."""
    depot = Depot(tmp_path, (32 * MIB, 32 * MIB), client_ttl=2)
    with depot, Raw(depot.config(rpc_seconds=0.5), 8 * MIB) as raw:
        names, data = new_names(16), secrets.token_bytes(MIB // 4)
        assert raw.put(names, [data] * 16) == [STORED] * 16
        depot.providers[0].kill()
        assert set(raw.get(names, MIB // 4)) == {b"", data}
        depot.providers[1].kill()
        with pytest.raises(StoreDown, match="none of 16 objects"):
            raw.get(names, MIB // 4)
        eventually(lambda: all(provider.gone() for provider in depot.providers))
        assert raw.there(names) == [False] * 16
        assert raw.get(names, MIB // 4) == [b""] * 16
        assert raw.put(new_names(1), [data]) == [FULL]


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


def test_a_process_that_stops_costs_look_ups_a_deadline(depot: Depot) -> None:
    store, _ = opened(depot.offload(failures=3, **(QUICK | {"lookup_seconds": 0.1})))
    os.kill(pid(store), signal.SIGSTOP)
    assert (store.lookup(["x"]), store.usable) == (None, True)
    assert (store.lookup(["x"]), store.lookup(["x"]), store.usable) == (None, None, False)
    assert store.snapshot()["last_error"] == "no answer in 0.1 s"
    os.kill(pid(store), signal.SIGCONT)
    eventually(lambda: store.usable)
    eventually(lambda: store.lookup(["vcache1/x"]) == 0)
    store.close()


def test_nobody_waits_for_a_process_that_reads_nothing(depot: Depot) -> None:
    with Raw(depot.config()) as stuck:
        os.kill(stuck.process.pid, signal.SIGSTOP)
        call = stuck.process.ask("exist", [4 * MIB * "x"])
        with pytest.raises(StoreDown, match="the offload process ended"):
            call.result(SECONDS)
        assert gone(stuck.process.pid)


def test_look_ups_of_several_threads_do_not_fail_each_other(depot: Depot) -> None:
    store, _ = opened(depot.offload(failures=1, **QUICK))
    os.kill(pid(store), signal.SIGSTOP)
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
    assert store.snapshot()["processes_started"] == 2
    buffer.memory.fill_(0)
    # It knows the memory, too.
    assert store.get(names, places(buffer)) == [SIZE]
    assert int(buffer.memory.sum()) == 7 * SIZE
    process = pid(store)
    store.close()
    eventually(lambda: gone(process))
    assert store.lookup(names) is None


def test_it_ends_with_its_parent(own_depot: Depot) -> None:
    """Also with one that is killed during a call which hangs."""
    code = f"""
from mooncake_cases import Raw
from vcache_backend.config import MooncakeConfig
with Raw(MooncakeConfig(master={own_depot.master.address!r}, hostname="127.0.0.1")) as raw:
    raw.put(["vcache1/a"], [bytes(65536)])
    print("process", raw.process.pid)
    while raw.get(["vcache1/a"]):
        pass
"""
    with Child([sys.executable, "-c", code]) as parent:
        process = int(parent.expect("process").split()[1])
        own_depot.providers[0].stop()
        parent.kill()
    eventually(lambda: gone(process))


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
