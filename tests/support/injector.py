"""Makes every function of ours that runs in a vLLM instance raise once, in a process that
`vllm_cases.Instance` forks: see test_injector.py.

For each case both halves of the connector, vLLM's scheduler and the metadata server's connections
are made anew, and every block of the KV cache is overwritten."""

from __future__ import annotations

import time
from typing import Any

from injector_cases import Case, Outcome, Scope, Watch, end
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm_cases import Answer, Prompt
from vllm_inside import Serving

from vcache_backend.integration.vllm import multi
from vcache_backend.integration.vllm.connector import VCacheConnector
from vcache_backend.integration.vllm.worker import worker
from vcache_backend.resident import mappings
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.session import Session

OUTERMOST = (
    # What vLLM calls without a guard: attributes are set and read, and a guarded method called.
    "VCacheConnector.update_state_after_alloc",
    "VCacheConnector.bind_connector_metadata",
    "VCacheConnector.get_block_ids_with_load_errors",
    "VCacheConnector.get_handshake_metadata",
    "VCacheConnector.build_connector_meta",
    "VCacheConnector.get_transfer_results",
    "VCacheConnector.has_connector_metadata",
    "VCacheConnector.requires_kv_delivery",
    "VCacheConnector.start_load_kv",
    "VCacheConnector._clear",
    "VCacheConnector.shutdown",
    "VCacheConnector.__init__",
    "VCacheConnector.stop",
    "VCacheConnector._no_shard",
    "VCacheConnector._say_off",
    "VCacheConnector.get_kv_connector_stats",
    "VCacheConnector.build_prom_metrics",
    "VCacheConnector.build_kv_connector_stats",
    # Parts of the layer, too.
    "AwaitedLoads.",
    "WorkerLoads.",
    # Ends of `Boundary.stop`.
    "VCacheScheduler.give_up",
    "VCacheWorker.give_up",
    "Generations.give_up",
    # In the place of functions of vLLM's block pool.
    "KVBlocks.guard",
    "KVBlocks._get_new_blocks",
    "KVBlocks._evict_blocks",
    "KVBlocks._reset_prefix_cache",
    "KVBlocks._cache_full_blocks",
    "KVBlocks._cache_partial_block",
    "_harmless.",
)
SCOPE = Scope(("",), ("boundary.py", "multi.py", "longest_hit.py", "others.py"), OUTERMOST)
"""All but the layer that the cases test."""
LAYER = (
    "__init__ stop shutdown _settled update_state_after_alloc _aggregate_request_finished "
    "build_connector_meta update_connector_output _heard handle_preemptions "
    "bind_connector_metadata bind_kv_cache_manager get_transfer_results _off get_block_ids_with_load_errors"
)
"""What vLLM hears of loads and frees beside other connectors, also if all else is off."""
BESIDE = tuple(f"VCacheMultiConnector.{name}" for name in LAYER.split())
BESIDE_OTHERS = Scope(("vllm/multi.py", "vllm/longest_hit.py"), (), BESIDE)
CLOSE_SECONDS, RETRY_SECONDS = 0.2, 0.02
TRIES = 10
"""How often a last request may find nothing, while a neighbour is tried again."""
MOST_STEPS = 400
"""A request that has not ended by then hangs."""


class Injecting(Serving):
    """The commands of an instance in which functions of ours raise."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # A part that has raised may never end: nobody waits long for it.
        worker.CLOSE_SECONDS, mappings.RETRY_SECONDS = CLOSE_SECONDS, RETRY_SECONDS
        neighbours = mappings.Neighbours.close, mappings.Neighbours.expects
        for close in (*neighbours, Outbox.close, Publisher.close, Session.flush):
            close.__defaults__ = CLOSE_SECONDS, *(close.__defaults__ or ())[1:]
        self._caches: dict[str, Any] = {}
        register = VCacheConnector.register_kv_caches

        def registers(connector: Any, kv_caches: dict[str, Any]) -> None:
            self._caches = kv_caches
            register(connector, kv_caches)

        VCacheConnector.register_kv_caches = registers
        super().__init__(arguments)
        VCacheConnector.register_kv_caches = register
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._kv = _ours()._worker.in_place
        beside = _ours() is not get_kv_transfer_group()
        self._scope, multi.TRANSFER_SECONDS = BESIDE_OTHERS if beside else SCOPE, 0.2
        self._pages = _pages()
        self._made = 0

    def functions(self, load: list[Prompt]) -> dict[str, int]:
        """How often each function of ours is called from the start to the end of a load in which
        nothing raises."""
        self._run(load, 0)
        watch = Watch(self._scope)
        outcome = self._watched(watch, load, [])
        assert not outcome, outcome
        return dict(watch.calls)

    def inject(self, case: Case, load: list[Prompt], answers: list[Answer]) -> Outcome:
        """Run the load with one exception, and say what came of it. load: see `_load`."""
        watch = Watch(self._scope, case)
        wrong = self._watched(watch, load, answers)
        hit, turn = 0, 0
        # A worker that fails in the last step says so in the next one.
        while not (wrong or self.off or hit) and turn < TRIES:
            assert self._core.scheduler.reset_prefix_cache()
            if not (hit := self._run([load[0]], turn)[0].cached):
                time.sleep(RETRY_SECONDS)
            turn += 1
        return Outcome(watch.raised, wrong, self.off, hit)

    @property
    def off(self) -> str:
        """Why the scheduler's half is out of use."""
        connector = self._core.scheduler.connector
        return str(connector.off or getattr(connector, "_ours", connector).off)

    def _watched(self, watch: Watch, load: list[Prompt], answers: list[Answer]) -> str:
        watch.begin()
        try:
            self.renew()
            return self._load(load, answers)
        except Exception as error:  # noqa: BLE001 - the engine would have ended
            import traceback

            return f"vLLM got {error!r}: {traceback.format_exc(limit=-4)}"
        finally:
            end()

    def renew(self) -> None:
        """Replace vLLM's scheduler and both halves of the connector, as at vLLM's start."""
        core, old = self._core, self._core.scheduler
        old.connector.shutdown()
        kv_transfer_state.ensure_kv_transfer_shutdown()
        for page in self._pages:
            page[1:] = 0x40
        config, caches = core.vllm_config, old.kv_cache_config
        kv_transfer_state.ensure_kv_transfer_initialized(config, caches)
        worker, ours = get_kv_transfer_group(), _ours()._half
        if self._kv is not None and ours is not None and ours.in_place:
            # vLLM allocates its KV cache once, within the first connector's context.
            ours.in_place.exporter = self._kv.exporter
        worker.register_kv_caches(self._caches)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
        core.scheduler = type(old)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=core.structured_output_manager,
            include_finished_set=old.finished_req_ids_dict is not None,
            log_stats=True,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        shown = worker.get_handshake_metadata()
        if shown is not None:
            core.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): shown})

    def _load(self, load: list[Prompt], answers: list[Answer]) -> str:
        """An ordinary load: hits beside a prompt that nobody has, an abort during a load, a prompt
        that continues one of ours. load: two prompts that another instance has, then one that
        nobody has, then one that continues it, and one that another connector has. Returns what is
        wrong."""
        shared, other, fresh, more, *kept = load
        self._made += 1
        fresh, more = (one._replace(salt=f"{self._made}") for one in (fresh, more))
        got = self._run([shared, fresh], self._made)
        name = f"{self._made} gone"
        self.add(name, other)
        self.step(1)
        self.abort(name)
        got += self._run([other, more, *kept], self._made + 0.5)
        if not self._freed():
            return "vLLM is never told that the blocks of a request are free"
        for which, (answer, expected) in enumerate(zip(got, answers, strict=False)):
            if not answer.agrees(expected):
                return f"answer {which} is wrong: {answer.tokens}, not {expected.tokens}"
        return ""

    def _freed(self) -> bool:
        scheduler, end = self._core.scheduler, time.monotonic() + 5.0
        while scheduler.requests and time.monotonic() < end:
            self.step(1)
        return not scheduler.requests

    def _run(self, prompts: list[Prompt], number: float) -> list[Answer]:
        names = [f"{number} {which}" for which in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt)
        done: dict[str, Answer] = {}
        for _ in range(MOST_STEPS):
            done |= self.step(1)
            if done.keys() >= set(names):
                return [done[name] for name in names]
        raise TimeoutError(f"{set(names) - done.keys()} hang")


def _ours() -> Any:
    """Our connector's half in the worker."""
    group = get_kv_transfer_group()
    return getattr(group, "_connectors", (group,))[0]


def _pages() -> list[Any]:
    kv = _ours()._worker._worker.kv
    return [page for kind in kv.kinds for page in kind.pages]
