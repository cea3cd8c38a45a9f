"""LMCache's worker beside ours: its loads, when its server is restarted under it, and when it leaves."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import SECONDS, eventually

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")
pytest.importorskip("lmcache.v1.multiprocess.transfer_context.shm", reason="no LMCache")

from lmcache.v1.gpu_connector import utils
from lmcache.v1.multiprocess.transfer_context import async_engine_driven, base, shm
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from vcache_backend.integration.vllm import lmcache_staging
from vcache_backend.integration.vllm.beside_lmcache import BesideLoads
from vcache_backend.integration.vllm.others import Guarded

SLOTS = [{"offset": 0, "length": 8, "shape": [2, 1, 1, 1], "dtype": "float32"}]
SAID = SimpleNamespace(success=True, context={"slots": SLOTS, "chunk_indices": [0]})
ANSWER = SimpleNamespace(wait=lambda timeout: True, result=lambda timeout=0.0: SAID)
NONE = SimpleNamespace(result=lambda timeout: SimpleNamespace(success=False))
BLOCK = 0


class Adapter:
    """LMCache's, as far as it is replaced; `registers` has it copy through another memory."""

    def __init__(self) -> None:
        self.instance_id, self.left = 7, list[int]()
        self.retrieve_futures: dict[str, Any] = {}
        self.error_block_ids = set[int]()
        self.is_healthy = self.waits = True
        self.filled = list[str]()
        self.transfer_ctx: Any = None
        self.cache = {"layer": torch.zeros(2, 1, 1, 1, 1)}
        connector = SimpleNamespace(worker_adapter=self, unregister_kv_caches=lambda: None)
        self.child = Guarded(connector, BesideLoads(lambda: self.waits, self.filled.append))

    def registers(self, context: Any) -> None:
        self._send_register_kv_caches_request(self.cache, context)

    def _send_register_kv_caches_request(self, _: Any, context: Any) -> None:
        given = (7, None)[: len(inspect.signature(EngineDrivenTransferContext).parameters)]
        self.transfer_ctx = EngineDrivenTransferContext(*given)  # 0.5.3 takes none
        self.transfer_ctx._engine_driven_context = context

    def get_finished(self) -> None:
        """As 0.5.3 does it: it names no blocks."""
        for name, (future, _) in list(self.retrieve_futures.items()):
            if future.query() or not self.is_healthy:
                del self.retrieve_futures[name]

    get_finished_with_lazy_offload = get_finished

    def shutdown(self) -> None:
        self.left += [self.instance_id, self.transfer_ctx._instance_id]

    def loads(self, name: str = "one", *blocks: int, in_chunk: int = 1) -> Any:
        """Begin a load; its future."""
        blocks = blocks or (BLOCK,)
        submit = self.transfer_ctx.submit_retrieve
        given = {"kv_caches": self.cache, "block_ids": [[*blocks]], "blocks_in_chunk": in_chunk}
        # 0.5.3 takes the instance's number, too.
        wanted = list(inspect.signature(submit).parameters)[1:-1]
        future = submit(name, **(dict.fromkeys(wanted) | given))
        self.retrieve_futures[name] = future, [*blocks]
        return future


class Asked:
    """A server that is asked for a load's places, and answers later."""

    def __init__(self, answer: Any = ANSWER) -> None:
        self.asked, self.answers, self.freed = (threading.Event() for _ in "123")
        self._answer = answer

    def prepare_retrieve(self, *_: Any) -> Any:
        self.asked.set()
        assert self.answers.wait(100)
        return self._answer

    def commit_retrieve(self, *_: Any) -> Any:
        self.freed.set()
        return ANSWER


@pytest.fixture
def memories() -> Iterator[list[Any]]:
    memory = Path(f"/dev/shm/vcache-test-{os.getpid()}")
    memory.write_bytes(torch.ones(16).numpy().tobytes())
    made = [shm.EngineDrivenContextShm(None, None, 1.0, memory.name, 64) for _ in "12"]
    memory.unlink()
    yield made
    for one in made:
        one.close()


def test_what_lmcache_has_not_written_is_not_committed(
    memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor written to the memory of a server that has died, once there is another one."""
    adapter, (dead, new) = Adapter(), memories
    adapter.registers(dead)
    assert dead._build_slot_tensors(SLOTS)

    def found_again(*_: Any) -> Any:
        """The server answers a heartbeat first."""
        adapter.registers(new)
        return ANSWER

    dead.req_client = SimpleNamespace(prepare_retrieve=found_again, prepare_store=lambda *_: ANSWER)
    # What raises in vLLM's thread puts LMCache out of use.
    assert dead.prepare_retrieve(None, 7) is None
    assert dead.prepare_store(None, 7) == (None, [0])
    assert not dead.commit_store(None, 7, [])
    assert new._build_slot_tensors(SLOTS)
    assert not caplog.messages
    adapter.registers(EngineDrivenContextPickle(None, None, 1.0))
    assert "LMCache pickles KV" in caplog.text
    assert "room in /dev/shm for --l1-size-gb" in caplog.text
    adapter.shutdown()
    assert adapter.left == [0, 0]


@pytest.mark.parametrize("end", ["server restarted", "out of use", "shut down", "asleep"])
def test_loads_under_way_end_as_failed(memories: list[Any], end: str) -> None:
    """Those that are queued, too, and at once: the server may never answer."""
    adapter, (dead, new) = Adapter(), memories
    adapter.registers(dead)
    dead.req_client = server = Asked()
    futures, submit = [adapter.loads(name) for name in "12"], adapter.transfer_ctx.submit_retrieve
    assert server.asked.wait(100)
    if end == "server restarted":
        adapter.registers(new)
    elif end == "out of use":
        adapter.child.fail("on purpose")
    elif end == "shut down":
        adapter.shutdown()
    else:
        adapter.child.unregister_kv_caches()
    if end != "asleep":
        futures.append(submit("3", None, adapter.cache, [[BLOCK]], None, 1))
    assert [each.query() and each.result() for each in futures] == [False] * len(futures)
    adapter.get_finished()
    assert adapter.error_block_ids == {BLOCK}
    server.answers.set()
    assert server.freed.wait(100)
    assert not adapter.cache["layer"].any()


@pytest.mark.parametrize("report", ["get_finished", "get_finished_with_lazy_offload"])
def test_a_load_that_nobody_awaits_writes_nothing(memories: list[Any], report: str) -> None:
    """Once its server is gone, LMCache says of all loads that they are over."""
    adapter, (dead, _) = Adapter(), memories
    adapter.registers(dead)
    dead.req_client = server = Asked()
    future = adapter.loads()
    assert server.asked.wait(100)
    adapter.is_healthy = False
    getattr(adapter, report)()
    assert (future.query(), future.result(), adapter.error_block_ids) == (True, False, {BLOCK})
    server.answers.set()
    assert server.freed.wait(100)
    assert not adapter.cache["layer"].any()


@pytest.mark.parametrize("case", ["filled", "not found", "not copied"])
def test_only_blocks_that_were_filled_count(memories: list[Any], case: str) -> None:
    """Whatever happens, the server may use its memory again."""
    adapter, (context, _) = Adapter(), memories
    adapter.registers(context)
    context.req_client = server = Asked(NONE if case == "not found" else ANSWER)
    server.answers.set()
    block, filled = 5 if case == "not copied" else BLOCK, case == "filled"
    assert adapter.loads("one", block).result(100) == filled
    assert server.freed.wait(100)
    adapter.get_finished()
    assert adapter.error_block_ids == (set() if filled else {block})
    assert bool(adapter.cache["layer"].all()) == filled


def test_the_memory_of_a_server_that_has_died_is_given_back(
    memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although vLLM has the collector leave what is there once it has started. CUDA hears of it
    while it is mapped: the next server's may get the same addresses."""
    adapter, dead, server = Adapter(), memories.pop(0), Asked()
    dead._pinned, dead._pinned_ptr, unpinned = True, 4096, list[tuple[int, int]]()

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"/dev/shm/vcache-test-{os.getpid()} ")

    def unpin(pointer: int) -> None:
        unpinned.append((pointer, mapped()))

    monkeypatch.setattr(shm.current_device_spec, "unpin_memory", unpin)
    adapter.registers(dead)
    dead.req_client, gone = server, weakref.ref(dead)
    for name in "12":
        adapter.loads(name)
    assert server.asked.wait(100)
    gc.disable()
    try:
        adapter.registers(memories[0])
        del dead
        assert not unpinned
        server.answers.set()
        eventually(lambda: gone() is None)
        eventually(lambda: mapped() == 1)
        assert unpinned == [(4096, 2)]
    finally:
        gc.enable()


def test_a_rank_registers_again_on_its_own_gpu(
    memories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache does it in a thread."""
    adapter, there = Adapter(), list[Any]()

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        there.extend((tensor, adapter.transfer_ctx))
        yield
        there.append(adapter.transfer_ctx)

    adapter.registers(memories[0])
    first = adapter.transfer_ctx
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    adapter.registers(memories[1])
    assert there == [adapter.cache["layer"], first, adapter.transfer_ctx]


def stored(device: str = "cpu") -> tuple[dict[str, Any], list[int], list[Any]]:
    """KV caches, blocks of theirs, and the chunks that LMCache makes of these: two blocks each."""
    torch.manual_seed(1)
    shape = 24, 16, 16, 64  # blocks, heads and tokens in either order, content
    caches = {str(layer): torch.rand(shape, device=device).bfloat16() for layer in range(3)}
    blocks = torch.randperm(24)[:22].tolist()
    return caches, blocks, base.gather_paged_kv_to_cpu(caches, blocks, 2)


@pytest.mark.parametrize("memory", ["enough", "none left"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_chunks_go_by_way_of_the_gpus_memory(
    device: str, memory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few at a time, there and back, those and the tokens left out that need not be copied. If
    the GPU has no memory left, LMCache's kernel copies to and from host memory."""
    lmcache_staging.warn_once.cache_clear()
    caches, blocks, right = stored(device)
    adapter = Adapter()
    adapter.registers(SimpleNamespace())
    loads, before = adapter.child._transfers._loads, None
    if memory == "none left":

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(torch, "empty_like", full)
    indices = [1, 2, 4, 5, 6, 7, 9, 10]
    found = [torch.zeros_like(right[0], pin_memory=right[0].is_pinned()) for _ in range(9)]
    gather = async_engine_driven.gather_paged_kv_to_cpu
    gather(caches, blocks, 2, out=found, chunk_indices=indices)
    if device == "cuda":
        torch.cuda.synchronize()
        loads._stream, before = torch.cuda.Stream(), torch.cuda.Event()
        before.record()
    assert all(map(torch.equal, found, [right[index] for index in indices]))
    assert not found[8].any()
    empty = {layer: torch.zeros_like(cache) for layer, cache in caches.items()}
    given = {"kv_caches": empty, "blocks_in_chunk": 2, "skip_first_n_tokens": 11 * 16}
    loads._copy(blocks, right, given, before)
    for layer, cache in empty.items():
        assert torch.equal(cache[blocks[11:]], caches[layer][blocks[11:]])
        assert not cache[blocks[:11]].any()
    assert caplog.text.count("not free") == (memory == "none left")


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_load_waits_for_the_steps_under_way_only_if_one_may_use_its_blocks(waits: bool) -> None:
    """A step is under way that takes a second or two."""
    caches, blocks, right = stored("cuda")
    adapter = Adapter()
    adapter.cache = {layer: torch.zeros_like(cache) for layer, cache in caches.items()}
    adapter.waits = waits
    server = SimpleNamespace(prepare_retrieve=lambda *_: right, commit_retrieve=lambda *_: None)
    adapter.registers(server)
    assert adapter.loads("kernels are compiled", *blocks, in_chunk=2).result(SECONDS)
    for cache in adapter.cache.values():
        cache.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)
    step = torch.cuda.Event()
    step.record()
    assert adapter.loads("one", *blocks, in_chunk=2).result(SECONDS)
    assert step.query() == waits
    for layer, cache in adapter.cache.items():
        assert torch.equal(cache[blocks], caches[layer][blocks])


def test_a_store_is_refused_room_for_too_few_chunks() -> None:
    """However its arguments are given: LMCache would commit all."""
    caches, blocks, right = stored()
    Adapter().registers(SimpleNamespace())
    found = [torch.zeros_like(chunk) for chunk in right]
    gather: Any = async_engine_driven.gather_paged_kv_to_cpu
    with pytest.raises(ValueError, match="out length"):
        gather(caches, blocks, 2, out=found[1:])
    assert not any(chunk.any() for chunk in found)
    gather(caches, blocks, 2, None, None, found)
    assert all(map(torch.equal, found, right))


def test_stores_share_a_little_of_the_gpus_memory() -> None:
    """vLLM has counted with its own only."""
    alive, both = list[int](), threading.Barrier(2)

    def gather(
        kv_caches: Any, block_ids: Any, blocks_per_chunk: int, out: Any, chunk_indices: Any
    ) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(1)
        alive.append(sum(type(each) is lmcache_staging.Staged for each in gc.get_objects()))

    module: Any = SimpleNamespace(gather_paged_kv_to_cpu=gather)
    lmcache_staging.stage_stores(module)
    out = [torch.zeros(1) for _ in range(2 * lmcache_staging.MOST_STAGED)]
    given = {"0": out[0]}, list(range(len(out))), 1, out, None
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(module.gather_paged_kv_to_cpu, *given) for _ in "12"]:
            done.result(100)
    assert alive == [lmcache_staging.MOST_STAGED] * 4


def test_lmcache_looks_at_the_kv_caches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are others, or lie elsewhere: it copies from and to where it has found them. They
    can go once it has left."""
    looks, theirs = list[int](), utils.detect_format

    def looked(kv_caches: Any, *given: Any) -> Any:
        looks.append(len(kv_caches))
        return theirs(kv_caches, *given)

    monkeypatch.setattr(utils, "detect_format", looked)
    adapter = Adapter()
    adapter.registers(SimpleNamespace())
    caches, blocks, right = stored()
    gather = async_engine_driven.gather_paged_kv_to_cpu
    for change in "nothing", "elsewhere", "others there":
        if change == "elsewhere":
            for cache in caches.values():
                cache.set_(cache.clone())
        elif change == "others there":
            caches = {layer: cache[:] for layer, cache in caches.items()}
        for _ in "12":
            found = [torch.zeros_like(chunk) for chunk in right]
            gather(caches, blocks, 2, out=found)
            assert all(map(torch.equal, found, right))
        assert looks == [3], change
        looks.clear()
    caches = {layer: torch.zeros_like(cache) for layer, cache in caches.items()}
    given = {"kv_caches": caches, "blocks_in_chunk": 2, "skip_first_n_tokens": 0}
    adapter.child._transfers._loads._copy(blocks, right, given, None)
    assert looks == [3]
    assert all(cache[blocks].any() for cache in caches.values())
    gone = weakref.ref(caches["0"])
    adapter.shutdown()
    caches, given = {}, {}
    gc.collect()
    assert gone() is None


def test_loads_do_without_what_only_stores_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(async_engine_driven, "gather_paged_kv_to_cpu")
    adapter = Adapter()
    adapter.registers(SimpleNamespace())
    assert adapter.child._transfers._loads is not None
    assert "gather_paged_kv_to_cpu" in caplog.text
