"""The offload process against a real master and real providers: what each verb answers, and how it
ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path

import pytest
from mooncake_cases import MIB, Raw, depot, needs_mooncake, new_names, own_depot, raw
from mooncake_store import Depot
from processes import Child, eventually

from vcache_backend.offload.process import FULL, STORED, StoreDown

__all__ = ["depot", "own_depot", "raw"]


pytestmark = needs_mooncake


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


# ---- providers fail


def test_what_a_killed_provider_had_is_a_miss(tmp_path: Path) -> None:
    """The master says for `client_ttl` that it is there."""
    depot = Depot(tmp_path, (32 * MIB, 32 * MIB), client_ttl=2)
    with depot, Raw(depot.config(rpc_seconds=2.0), 8 * MIB) as raw:
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


def test_nobody_waits_for_a_process_that_reads_nothing(depot: Depot) -> None:
    with Raw(depot.config()) as stuck:
        os.kill(stuck.process.pid, signal.SIGSTOP)
        eventually(lambda: "\nState:\tT" in Path(f"/proc/{stuck.process.pid}/status").read_text())
        with pytest.raises(StoreDown, match="the offload process ended"):
            stuck.call("exist", [4 * MIB * "x"])
        assert gone(stuck.process.pid)


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
