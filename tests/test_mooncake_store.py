"""Mooncake as the offload tier, against a real master and real providers: what each call answers."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mooncake_cases import MIB, Depot, Memory, depot, needs_mooncake, new_names  # noqa: F401 - depot is a fixture
from processes import eventually

from vcache_backend.config import ByteSize, MooncakeConfig, mooncake_environment
from vcache_backend.errors import ConfigError
from vcache_backend.offload.mooncake import MooncakeStore, State
from vcache_backend.offload.store import ObjectStore, Put, Span, StoreDown

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def opened(depot: Depot) -> Iterator[MooncakeStore]:  # noqa: F811
    """Shared by the module: leave it open."""
    made = MooncakeStore(depot.config())
    made.open()
    yield made
    assert made.close(10)


@contextmanager
def opened_store(config: MooncakeConfig) -> Iterator[MooncakeStore]:
    made = MooncakeStore(config)
    made.open()
    yield made
    assert made.close(10)


def random_memory(nbytes: int) -> Memory:
    return Memory(secrets.token_bytes(nbytes))


def test_what_was_put_is_there_and_comes_back(opened: MooncakeStore) -> None:
    store: ObjectStore = opened
    names, data = new_names(3), [random_memory(size) for size in (1, 4097, 4 * MIB)]
    assert store.contains_prefix(names) == 0
    assert store.put(names, [memory.span for memory in data]) == [Put.STORED] * 3
    assert store.contains_prefix(names) == 3
    targets = [Memory(memory.span.nbytes) for memory in data]
    assert store.get_into(names, [target.span for target in targets]) == [1, 4097, 4 * MIB]
    assert [target.read() for target in targets] == [memory.read() for memory in data]


def test_what_was_removed_is_gone_though_it_was_just_read(opened: MooncakeStore) -> None:
    """Mooncake protects what was read for 10 s; a bad object must go all the same."""
    names, data = new_names(2), random_memory(MIB)
    opened.put(names, [data.span] * 2)
    target = Memory(MIB)
    assert opened.get_into(names, [target.span] * 2) == [MIB, MIB]
    opened.remove([names[0], "vcache1/never"])
    assert opened.contains_prefix(names) == 0
    assert opened.get_into(names, [target.span] * 2) == [0, MIB]


def test_all_that_is_under_a_prefix_goes_and_nothing_else(depot: Depot, opened: MooncakeStore) -> None:  # noqa: F811
    """Also what was read just now, and what others wrote; a dot in a tenant's name stands for itself."""
    (start,), data = new_names(1), random_memory(100)
    mine, other = [f"{start}{i:02x}" for i in range(20)], f"{start[:-1]}x"
    opened.put([*mine, other], [data.span] * 21)
    target = Memory(100)
    assert opened.get_into(mine[:1], [target.span]) == [100]
    for tenant, theirs in (("a.b", 2), ("axb", 1)):
        with opened_store(depot.config(tenant=tenant)) as tenants:
            tenants.put(mine[:theirs], [data.span] * theirs)
    with opened_store(depot.config(tenant="a.b")) as tenants:
        assert tenants.remove_under(start) == 2
    assert opened.remove_under(start) == 20
    assert opened.contains_prefix(mine[:1]) == 0
    assert opened.contains_prefix([other]) == 1
    assert opened.remove_under(start) == 0
    with opened_store(depot.config(tenant="axb")) as tenants:
        assert tenants.contains_prefix(mine[:1]) == 1


def test_a_batch_with_holes_answers_for_each_object(opened: MooncakeStore) -> None:
    names, data = new_names(5), [random_memory(4096) for _ in range(5)]
    there = [0, 1, 3]
    opened.put([names[place] for place in there], [data[place].span for place in there])
    assert opened.contains_prefix(names) == 2
    targets = [Memory(4096) for _ in names]
    assert opened.get_into(names, [target.span for target in targets]) == [4096, 4096, 0, 4096, 0]
    for place, target in enumerate(targets):
        assert target.read() == (data[place].read() if place in there else bytes(4096))


def test_a_larger_target_says_the_objects_size_and_a_smaller_one_stays_as_it_is(opened: MooncakeStore) -> None:
    (name,), data = new_names(1), random_memory(4096)
    opened.put([name], [data.span])
    large, small = Memory(8192), Memory(1024)
    assert opened.get_into([name], [large.span]) == [4096]
    assert large.read() == data.read() + bytes(4096)
    assert opened.get_into([name], [small.span]) == [0]
    assert small.read() == bytes(1024)


def test_the_first_writer_wins(opened: MooncakeStore) -> None:
    (name,), first, second = new_names(1), random_memory(MIB), random_memory(MIB)
    assert opened.put([name], [first.span]) == [Put.STORED]
    assert opened.put([name], [second.span]) == [Put.STORED]
    target = Memory(MIB)
    assert opened.get_into([name], [target.span]) == [MIB]
    assert target.read() == first.read()


def test_two_writers_of_one_name_leave_the_bytes_of_one(depot: Depot, opened: MooncakeStore) -> None:  # noqa: F811
    other = MooncakeStore(depot.config())
    other.open()
    names, together = new_names(10), threading.Barrier(2)
    data = {store: random_memory(MIB) for store in (opened, other)}

    def write(store: MooncakeStore) -> None:
        for name in names:
            together.wait(20)
            store.put([name], [data[store].span])

    writers = [threading.Thread(target=write, args=(store,), daemon=True) for store in data]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    targets = [Memory(MIB) for _ in names]
    assert opened.get_into(names, [target.span for target in targets]) == [MIB] * len(names)
    assert {target.read() for target in targets} <= {memory.read() for memory in data.values()}
    assert other.close(10)


def test_an_object_larger_than_any_segment_is_not_stored(opened: MooncakeStore) -> None:
    names, data = new_names(2), Memory(200 * MIB)
    assert opened.put(names, [data.span, Span(data.span.address, 4096)]) == [Put.FULL, Put.STORED]
    assert opened.contains_prefix(names[:1]) == 0


def test_a_full_pool_says_so_and_has_nothing_of_what_it_did_not_take(tmp_path: Path) -> None:
    with Depot(tmp_path, (16 * MIB,)) as small:
        store = MooncakeStore(small.config())
        store.open()
        names, data = new_names(6), random_memory(4 * MIB)
        answers = store.put(names, [data.span] * 6)
        assert set(answers) == {Put.STORED, Put.FULL}
        target = Memory(4 * MIB)
        for name, answer in zip(names, answers, strict=True):
            (size,) = store.get_into([name], [target.span])
            assert size == 0 or answer is Put.STORED
            assert size == 0 or target.read() == data.read()
        assert store.is_open
        assert store.stats()["put_full"] == answers.count(Put.FULL)
        assert store.close(10)


def test_empty_batches_ask_nobody(opened: MooncakeStore) -> None:
    assert (opened.contains_prefix([]), opened.put([], []), opened.get_into([], [])) == (0, [], [])
    opened.remove([])


def test_tenants_do_not_see_each_others_objects(depot: Depot, opened: MooncakeStore) -> None:  # noqa: F811
    """Also of a master that was not told of tenants, which ignores whose an object is."""
    store = MooncakeStore(depot.config(tenant="red"))
    store.open()
    names, data = new_names(2), random_memory(4096)
    assert store.put(names[:1], [data.span]) == [Put.STORED]
    assert opened.put(names[1:], [data.span]) == [Put.STORED]
    assert (store.contains_prefix(names), opened.contains_prefix(names)) == (1, 0)
    assert (store.contains_prefix(names[1:]), opened.contains_prefix(names[1:])) == (0, 1)
    assert store.close(10)


def test_replicas_lie_on_different_providers(depot: Depot) -> None:  # noqa: F811
    store = MooncakeStore(depot.config(replicas=2))
    store.open()
    (name,), data = new_names(1), random_memory(MIB)
    before = depot.master.segments()
    assert store.put([name], [data.span]) == [Put.STORED]
    after = depot.master.segments()
    assert sorted(after[segment] - before[segment] for segment in after) == [MIB, MIB]
    store.remove([name])
    assert store.close(10)


def test_calls_before_open_and_after_close_raise_and_it_opens_again(depot: Depot) -> None:  # noqa: F811
    """The library itself would end the process with a segmentation fault."""
    store = MooncakeStore(depot.config())
    (name,), data = new_names(1), random_memory(4096)
    calls = [
        lambda: store.contains_prefix([name]),
        lambda: store.put([name], [data.span]),
        lambda: store.get_into([name], [data.span]),
        lambda: store.remove([name]),
    ]
    for _ in range(2):
        assert not store.is_open
        for call in calls:
            with pytest.raises(StoreDown, match="not open"):
                call()
        store.open()
        store.open()
        assert store.is_open
        assert store.put([name], [data.span]) == [Put.STORED]
        assert store.close(10)
        assert store.close(10)
    for call in calls:
        with pytest.raises(StoreDown, match="is closed"):
            call()
    assert store.stats()["opened"] == 2


def test_a_store_that_was_never_open_closes() -> None:
    store = MooncakeStore(MooncakeConfig())
    assert store.close(0)
    assert store.state is State.CLOSED


def test_memory_may_be_registered_before_and_after_open(depot: Depot) -> None:  # noqa: F811
    store, memory, name = MooncakeStore(depot.config()), [random_memory(MIB) for _ in range(2)], new_names(2)
    store.register(memory[0].span)
    store.open()
    store.register(memory[1].span)
    assert store.put(name, [one.span for one in memory]) == [Put.STORED] * 2
    assert store.close(10)


def test_memory_that_this_process_lends_goes_with_it(tmp_path: Path) -> None:
    with Depot(tmp_path, ()) as empty:
        store = MooncakeStore(empty.config(segment_bytes=ByteSize(64 * MIB)))
        store.open()
        assert len(empty.master.segments()) == 1
        names, data, target = new_names(1), random_memory(MIB), Memory(MIB)
        assert store.put(names, [data.span]) == [Put.STORED]
        assert store.get_into(names, [target.span]) == [MIB]
        assert target.read() == data.read()
        assert store.close(10)
        eventually(lambda: not empty.master.segments())


def test_it_logs_what_is_in_force_when_it_opens(depot: Depot, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    caplog.set_level(logging.INFO, "vcache_backend.offload.mooncake")
    store = MooncakeStore(depot.config(hostname="", tenant="blue"))
    store.open()
    (said,) = caplog.messages
    for piece in (
        f"master_server_addr={depot.master.address}",
        "local_hostname=127.0.0.1",
        "tenant_id=blue",
        "MC_RPC_TIMEOUT_MS=",
    ):
        assert piece in said
    assert store.close(10)


def test_the_library_is_told_our_deadlines_but_for_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MC_RPC_TIMEOUT_MS", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_STORE_CLIENT_SETUP_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "7")
    said = mooncake_environment(MooncakeConfig(rpc_seconds=2.5))
    assert said["MC_RPC_TIMEOUT_MS"] == "2500"
    assert said["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "4"
    assert said["MC_STORE_CLIENT_SETUP_RETRIES"] == "7"


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=r"pip install vcache-backend\[mooncake\]"):
        MooncakeStore(MooncakeConfig())
