"""LMCache's worker where it copies KV itself, from and to the shared memory of its server
(`engine_driven`): its loads run beside vLLM's steps, its copies go through the GPU's memory, and
nothing touches memory that has become somebody else's.

As LMCache does it (0.5.3 to 0.5.6), a load runs within a step, which waits until it is over, and a
late store is committed to a server that has never had it. 0.5.3 takes blocks for filled that a load
could not fill."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from vcache_backend.transfer.outbox import Outbox, at_once

from .. import hooks
from .lmcache_staging import keep_format, stage_stores, staged

log = logging.getLogger("vllm.vcache")

COPY_SECONDS = 60
"""How long a copy under way is waited for. It takes some milliseconds."""


def maps(other: Any) -> bool:
    """Whether LMCache's server would map the KV cache itself, by CUDA's older handles, which do not
    fit memory that vcache exports."""
    told: Mapping[str, Any] = other._kv_transfer_config.kv_connector_extra_config or {}
    mode = told.get("lmcache.mp.mp_transfer_mode", os.environ.get("LMCACHE_MP_TRANSFER_MODE"))
    return "LMCacheMP" in type(other).__name__ and mode != "engine_driven"


class BesideLoads(NamedTuple):
    """What LMCache's loads have to do with ours. waits: whether one that begins now waits for the
    work launched so far (`VCacheConnector.loads_wait`). filled: called, in the load's thread, with
    the name of a request whose load has filled its blocks."""

    waits: Callable[[], bool]
    filled: Callable[[str], None]


ALONE = BesideLoads(lambda: True, lambda _: None)


class Transfers:
    """What LMCache's worker copies. It registers with its server at the start, and again, in
    another thread, once a server has been restarted: then what is under way ends."""

    def __init__(self, connector: Any, beside: BesideLoads) -> None:
        """connector: LMCache's, which is changed, and its adapter. Raises hooks.Changed."""
        self._adapter, self._beside = connector.worker_adapter, beside
        adapter = self._adapter
        self._under_way: list[LMCacheLoad] = []
        """All that LMCache awaits. Changed in vLLM's thread only."""
        self._loads: LMCacheLoads | None = None
        self._forget: Callable[[], None] = lambda: None
        hooks.replace(adapter, "_send_register_kv_caches_request", self._registers)
        hooks.replace(adapter, "get_finished", self._reports)
        if hasattr(adapter, lazily := "get_finished_with_lazy_offload"):  # from 0.5.6 on
            hooks.replace(adapter, lazily, self._reports)
        hooks.replace(adapter, "shutdown", self._leaves)
        if hasattr(connector, sleeps := "unregister_kv_caches"):  # vLLM 0.33 and later
            hooks.observe(connector, sleeps, "", before=self._drop_all)

    def end(self) -> None:
        """Begin no more loads, and drop those under way. Any thread."""
        if self._loads is not None:
            self._loads.end()
        self._drop_all()

    def _drop_all(self) -> None:
        for load in list(self._under_way):
            load.drop()

    @property
    def _context(self) -> Any:
        """What copies through the server's memory; None in LMCache's other mode."""
        return getattr(self._adapter.transfer_ctx, "_engine_driven_context", None)

    def _registers(self, theirs: Callable[..., Any]) -> Callable[..., None]:
        def register(kv_caches: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            if old := self._context:
                # The memory may be another server's. What fails there raises nothing.
                old.commit_store = lambda *_: False
                old._build_slot_tensors = lambda _: None
                self.end()
                # It would be part of a cycle, and the dead server's memory stay mapped.
                vars(self._adapter.transfer_ctx).pop("submit_retrieve", None)
                unpin_with(old, gpu_of(kv_caches))
            with gpu_of(kv_caches):
                theirs(kv_caches, *args, **kwargs)
            if new := self._context:
                if type(new).__name__ == "EngineDrivenContextPickle":
                    how = "start its server with --no-l1-use-lazy, --shm-name, and room in /dev/shm"
                    how += " for --l1-size-gb (docs/lmcache.md)"
                    log.warning("vcache: LMCache pickles KV, which is slow: %s", how)
                self._take_over(new)

        return register

    def _take_over(self, context: Any) -> None:
        try:
            self._loads = LMCacheLoads(self._adapter, context, self._under_way, self._beside)
            from lmcache.v1.multiprocess.transfer_context import async_engine_driven

            stage_stores(async_engine_driven)
        except (ImportError, hooks.Changed) as error:
            log.warning("LMCache's copies hold up vLLM's steps: %s", error)
        try:
            from lmcache.v1.gpu_connector import utils

            self._forget = keep_format(utils)
        except (ImportError, hooks.Changed) as error:
            log.warning("LMCache's copies hold Python's lock for longer: %s", error)

    def _reports(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def get_finished(*args: Any, **kwargs: Any) -> Any:
            told = theirs(*args, **kwargs)
            if self._under_way:
                self._settle()
            return told

        return get_finished

    def _settle(self) -> None:
        """After each of LMCache's reports: drop what it awaits no more, since vLLM may take the
        blocks of a load that was reported, as all are once their server is gone. And name the
        blocks that were not filled: LMCache 0.5.3 does not."""
        awaited = {id(future) for future, *_ in self._adapter.retrieve_futures.values()}
        for load in self._under_way:
            if id(load.future) not in awaited:
                load.drop()
                if not load.future.result(0.0):
                    self._adapter.error_block_ids.update(load.blocks)
        self._under_way[:] = [load for load in self._under_way if id(load.future) in awaited]

    def _leaves(self, theirs: Callable[[], Any]) -> Callable[[], None]:
        def leave() -> None:
            self.end()
            if self._context is not None:
                # Unregistered, it would have its server commit what it has not written.
                self._adapter.instance_id = self._adapter.transfer_ctx._instance_id = 0  # nobody's
            try:
                theirs()
            finally:
                self._forget()  # Stores under way have ended.

        return leave


def gpu_of(caches: Mapping[str, Any]) -> Any:
    """A context in which CUDA's streams are made for the GPU of the KV caches. A thread begins on
    GPU 0: with the streams there LMCache would commit what this GPU has not yet written."""
    first = next(iter(caches.values()), None)
    if not isinstance(first, torch.Tensor):
        return nullcontext()
    return torch.cuda.device_of(first)  # type: ignore[no-untyped-call]


def unpin_with(context: Any, gpu: Any) -> None:
    """When a dead server's context goes, and before its memory is unmapped, have CUDA forget the
    memory. LMCache does not: if the next server's got the same addresses, CUDA would go on copying
    from and to the dead one's. gpu: see `gpu_of`."""
    if pinned := getattr(context, "_pinned_ptr", 0):
        from lmcache.v1.platform import current_device_spec

        def unpin() -> None:
            with gpu:
                current_device_spec.unpin_memory(pinned)

        context._pinned_ptr = 0  # It does not do so itself as well.
        weakref.finalize(context, unpin).atexit = False


class LMCacheLoad:
    """A load of LMCache's. future: its result, LMCache's own kind: whether the blocks are
    filled."""

    def __init__(self, future: Any, blocks: list[int], name: str) -> None:
        self.future, self.blocks, self.name = future, blocks, name
        self.lock = threading.Lock()

    @property
    def over(self) -> bool:
        return bool(self.future.query())

    def finish(self, filled: bool) -> None:
        """Under the lock."""
        if not self.over:
            self.future.set_result(filled)

    def drop(self) -> None:
        """End it as failed, if it is not over. Waits for its copy: afterwards the blocks are
        vLLM's."""
        if self.over:
            return
        # If the process stands still, so does the copy: that costs one of the waits only.
        held = any(self.lock.acquire(timeout=1.0) for _ in range(COPY_SECONDS))
        if not held:
            log.error("a load of LMCache's has copied for %d s", COPY_SECONDS)
        self.finish(False)
        if held:
            self.lock.release()


class LMCacheLoads:
    """The loads through one server's memory, one after the other, in a thread of their own."""

    def __init__(
        self,
        adapter: Any,
        context: Any,
        under_way: list[LMCacheLoad],
        beside: BesideLoads,
    ) -> None:
        """context: copies through the server's memory. under_way: where loads are noted. Raises
        hooks.Changed."""
        from lmcache.v1.multiprocess.futures import MessagingFuture
        from lmcache.v1.multiprocess.transfer_context.base import scatter_cpu_to_paged_kv as scatter

        self._adapter, self._under_way, self._beside = adapter, under_way, beside
        self._context: Any = context
        """None once no more loads begin."""
        self._future, self._scatter = MessagingFuture, scatter
        self._stream: Any = None
        hooks.require(adapter, "error_block_ids retrieve_futures")
        transfer = adapter.transfer_ctx
        known = {"layout_hints", "engine_kv_format", "engine_type"}
        taken = known & inspect.signature(scatter).parameters.keys()
        hooks.require(transfer, " ".join(f"_{name}" for name in taken))
        self._format = {name: getattr(transfer, f"_{name}") for name in taken}
        wanted = "key kv_caches block_ids blocks_in_chunk skip_first_n_tokens"
        hooks.replace(transfer, "submit_retrieve", self._submits, wanted)
        self._outbox = Outbox()

    def end(self) -> None:
        """Begin no more of them. Any thread."""
        self._context = None
        self._outbox.close(0.0)

    def _submits(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.signature(theirs)

        def submit(*args: Any, **kwargs: Any) -> Any:
            bound = names.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            (blocks,) = given["block_ids"]
            name = next(iter(given.values()))  # the request's
            load = LMCacheLoad(self._future(), blocks, name)
            device = next(iter(given["kv_caches"].values())).device
            before = None
            if device.type == "cuda":
                self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                if self._beside.waits():
                    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    before.record()
            self._under_way.append(load)
            self._outbox.after(at_once, lambda: self._run(load, given, before))
            if self._context is None:
                load.drop()
            return load.future

        return submit

    # ---- the thread

    def _run(self, load: LMCacheLoad, given: Mapping[str, Any], before: Any) -> None:
        """Ask the server for the chunks' places, copy, and have the places freed."""
        context = self._context
        try:
            if load.over or context is None:
                return
            told = given["key"], self._adapter.instance_id
            chunks = context.prepare_retrieve(*told)
            try:
                with load.lock:
                    if chunks is not None and not load.over:
                        self._copy(load.blocks, chunks, given, before)
                        if not load.over:
                            self._beside.filled(load.name)
                    load.finish(chunks is not None)
            finally:
                context.commit_retrieve(*told)
        except Exception as error:
            if not load.over:
                log.warning("LMCache's load has failed: %s", error, exc_info=error)
        finally:
            with load.lock:
                load.finish(False)

    def _copy(
        self, blocks: list[int], chunks: list[Any], given: Mapping[str, Any], before: Any
    ) -> None:
        caches, each = given["kv_caches"], given["blocks_in_chunk"]
        with torch.inference_mode(), self._after(before):
            for first, part, there in staged(chunks, caches):
                for source, target in zip(part, there, strict=True):
                    target.copy_(source, non_blocking=True)
                these = blocks[first * each : (first + len(part)) * each]
                skipped = max(0, given["skip_first_n_tokens"] - first * part[0].shape[-2])
                self._scatter(
                    caches, these, there, each, skip_first_n_tokens=skipped, **self._format
                )

    @contextmanager
    def _after(self, before: Any) -> Iterator[None]:
        """On a GPU: a context whose copies begin after the event, if any, and are over when it
        ends."""
        if self._stream is None:
            yield
            return
        # Left on GPU 0, as any new thread is, a rank of another GPU would take memory there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            if before is not None:
                self._stream.wait_event(before)
            try:
                yield
            finally:
                self._stream.synchronize()
