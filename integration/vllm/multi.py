"""vLLM's MultiConnector with our connector first and others behind it.

vLLM's own takes the first hit, so a short hit of ours would hide a longer one, and passes on every
report of every connector, though vLLM ends at a report that it does not expect (vLLM issues 51786
and 53049, assertions in 0.31 to 0.33). This one takes the longest hit, and passes on one report for
each load and each delayed free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)

from vcache_backend.errors import ConfigError, VCacheError

from .. import plugin
from .beside_lmcache import BesideLoads, maps
from .boundary import Boundary, answer, guarded
from .longest_hit import Hits, LongestHit
from .model import compat
from .others import Guarded, misfits

TRANSFER_SECONDS = 10.0
"""How long the transfers of a connector that has raised may take: until then its blocks are not
used again."""


class AcceptedLoad(NamedTuple):
    """A load that vLLM has accepted: the number of its connector, whether vLLM waits for its
    report, the blocks that it fills, and another connector's number among our loads (0: none)."""

    child: int
    waits: bool
    blocks: frozenset[int]
    number: int = 0


@dataclass
class JointMetadata(MultiKVConnectorMetadata):  # type: ignore[misc]
    """loads: that begin with the step. holds: by finished request, the connectors whose report its
    blocks wait for. off: the scheduler's half is out of use. ends: see `StepMetadata`. A connector
    out of use has None in `metadata`."""

    loads: dict[str, AcceptedLoad] = field(default_factory=dict)
    holds: dict[str, set[int]] = field(default_factory=dict)
    off: bool = False
    ends: tuple[str, str] = ("", "")


@dataclass
class RequestState:
    """What the scheduler's half knows of a request."""

    hits: Hits = field(default_factory=Hits)
    loading: bool = False
    """vLLM waits for the load's report."""
    holds: set[int] = field(default_factory=set)
    """Connectors whose report the blocks of the finished request wait for."""
    sent: bool = False
    """All of these have reported, while the load goes on."""
    over: bool = False
    reported_by: float = 0.0
    """When the workers must have reported a load of which vLLM has heard (time.monotonic)."""


class VCacheMultiConnector(Boundary, MultiConnector):  # type: ignore[misc]
    """VCacheConnector and other connectors, configured as vLLM's MultiConnector is. Every connector
    stores what it stores alone. A request's KV comes from the connector with the longest hit.

    If a method of ours raises, this half and its connectors are out of use (see `Boundary`). What
    vLLM waits for then ends after `TRANSFER_SECONDS`, in which transfers under way end: loads as
    failed, delayed frees as done."""

    _connectors: list[Any]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError for connectors that cannot stand side by side. Another connector's
        constructor may raise, as it does without us."""
        transfer = vllm_config.kv_transfer_config
        kinds = [kind for kind, _ in self._get_connector_classes_and_configs(vllm_config)]
        hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        if fault := plugin.misplaced(transfer) or next(misfits(kinds, hybrid), ""):
            raise ConfigError(fault)
        MultiConnector.__init__(self, vllm_config, role, kv_cache_config)
        plans = role == KVConnectorRole.SCHEDULER
        half = f"vLLM's {'scheduler' if plans else 'worker'} (pid {os.getpid()})"
        Boundary.__init__(self, f"{half} with several connectors", says=plans)
        ours, *others = self._connectors
        if plans:
            ours.open_nothing()
        beside = BesideLoads(self._must_wait, self._filled)
        self._ours, self._others = ours, [Guarded(one, beside) for one in others]
        self._connectors = [ours, *self._others]
        if getattr(ours, "in_place", False) and any(map(maps, others)):
            raise ConfigError(
                "LMCache's server cannot map a KV cache that is shared in place: give "
                'LMCacheMPConnector "lmcache.mp.mp_transfer_mode": "engine_driven", and start the '
                "server with --supported-transfer-mode engine_driven (docs/lmcache.md)"
            )
        self.config = ours.config
        # vLLM's scheduler reads the policy after the constructor has run.
        if ours.config is not None:
            transfer.kv_load_failure_policy = ours.config.connector.kv_load_failure_policy
        self.holds_back = bool(transfer.is_kv_consumer)
        """vLLM hands no block out while a step under way may write to it."""
        self._longest = LongestHit(self._connectors, vllm_config.cache_config.block_size)
        self._block = vllm_config.cache_config.block_size
        self._off_at = 0.0
        self._pool: Any = None
        self._requests: dict[str, RequestState] = {}
        self._new_loads: dict[str, AcceptedLoad] = {}
        self._new_holds: dict[str, set[int]] = {}
        self._running: dict[str, AcceptedLoad] = {}
        """In the worker: loads for whose report vLLM waits."""
        self._failed, self._over = set[str](), set[str]()
        """Running loads that have failed, and those that are over."""
        self._filling: dict[int, set[int]] = {}
        """By connector, the blocks that it fills within the step."""
        self._held: dict[str, set[int]] = {}
        self._invalid = set[int]()

    def stop(self) -> None:
        self._off_at = monotonic()
        for child in self._connectors:
            child.fail("what puts it beside others has failed")

    def shutdown(self) -> None:
        self.close()
        super().shutdown()

    @property
    def _settled(self) -> bool:
        """This half is out of use, and no transfer that it knew is under way any more."""
        return bool(self.off) and monotonic() > self._off_at + TRANSFER_SECONDS

    # ---- in the scheduler: a request

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._pool = kv_cache_manager.block_pool
        super().bind_kv_cache_manager(kv_cache_manager)

    @guarded(answer((0, False)))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        state = self._requests.setdefault(request.request_id, RequestState())
        if self._ours.unreported(request.request_id):
            return self._not_yet(state)
        hits, state.reported_by = state.hits, 0.0
        tokens, waits = self._longest.of(hits, request, num_computed_tokens)
        if tokens is not None:
            self._requests_to_connector.pop(request.request_id, None)
            if hits.chosen is not None:
                self._requests_to_connector[request.request_id] = hits.chosen
        return tokens, waits

    def _not_yet(self, state: RequestState) -> tuple[None, bool]:
        """Have vLLM ask again: workers report loads by request, so that the next one's report could
        be taken for the last one's. Raises VCacheError once that takes too long."""
        state.reported_by = state.reported_by or monotonic() + 2 * TRANSFER_SECONDS
        if monotonic() > state.reported_by:
            late = f"within {2 * TRANSFER_SECONDS:.0f} s"
            raise VCacheError(f"a load that is over was not reported {late}")
        return None, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        state = self._requests.setdefault(request.request_id, RequestState())
        hits = state.hits
        chosen = hits.chosen if num_external_tokens else None
        if chosen is not None:
            state.loading = hits.waits
            first = hits.local // self._block
            tables = blocks.get_block_ids() if chosen else ()  # ours are reported by request
            filled = frozenset(block for table in tables for block in table[first:])
            number = self._ours.awaits(request.request_id) if chosen and hits.waits else 0
            self._new_loads[request.request_id] = AcceptedLoad(chosen, hits.waits, filled, number)
        self._allocated(hits, chosen, request, blocks, num_external_tokens)

    @guarded(answer(None))
    def _allocated(
        self, hits: Hits, chosen: int | None, request: Any, blocks: Any, external: int
    ) -> None:
        for number, child in enumerate(self._connectors):
            late = number in hits.late and getattr(child, "tracks", False)
            if number == chosen:
                child.update_state_after_alloc(request, blocks, external)
            elif late and chosen is not None and hits.waits:
                # Once the load is over, with the answer: before it, what its look-up has found
                # would stay locked for minutes.
                continue
            else:
                if late and hits.loader is not None:
                    child.get_num_new_matched_tokens(request, request.num_computed_tokens)
                hits.late.discard(number)
                child.update_state_after_alloc(request, blocks, 0)
        hits.allocated(chosen)

    def _aggregate_request_finished(
        self, request: Any, per_connector_fn: Callable[[Any], Any]
    ) -> tuple[bool, dict[str, Any] | None]:
        """For vLLM's `request_finished` and `request_finished_all_groups`."""
        name = request.request_id
        params = self._tell_finished(name, per_connector_fn)
        self._requests_to_connector.pop(name, None)
        state = self._requests.setdefault(name, RequestState())
        if self.off and not self._settled:
            # Another connector may still read the blocks, and nobody knows which.
            state.holds = {*range(len(self._connectors))}
        state.over = True
        if state.holds:
            self._new_holds[name] = state.holds
        elif not state.loading:
            del self._requests[name]
        return bool(state.holds), params

    @guarded(answer(None))
    def _tell_finished(self, name: str, tell: Callable[[Any], Any]) -> dict[str, Any] | None:
        params = None
        state = self._requests.setdefault(name, RequestState())
        for number, child in enumerate(self._connectors):
            holds, told = tell(child)
            if holds:
                state.holds.add(number)
            if told is not None:
                params = {**told, **(params or {})}
        return params

    @guarded(lambda self, *_: not self._settled)
    def register_finished_partial_tail(self, request: Any, *given: Any) -> bool:
        state = self._requests.setdefault(request.request_id, RequestState())
        for number, child in enumerate(self._connectors):
            if child.register_finished_partial_tail(request, *given):
                state.holds.add(number)
        return bool(state.holds)

    # ---- in the scheduler: a step

    def build_connector_meta(self, scheduler_output: Any) -> JointMetadata:
        self._longest.spent = 0.0
        made = tuple(child.build_connector_meta(scheduler_output) for child in self._connectors)
        meta = JointMetadata(made, loads=self._new_loads, holds=self._new_holds, off=bool(self.off))
        if any(load.number for load in self._new_loads.values()):
            meta.ends = self._ours.ends_address
        self._new_loads, self._new_holds = {}, {}
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """Leave one report for each load and each delayed free. vLLM frees the blocks of a finished
        request at its first report: of an aborted load it gets the last."""
        super().update_connector_output(connector_output)
        output = connector_output
        if output.invalid_block_ids and self._ours.off and self._pool is not None:
            # vLLM leaves them in its prefix cache, though their request may be aborted.
            self._pool.evict_blocks({*range(self._pool.num_gpu_blocks)})
        for name in output.failed_recving & self._requests.keys():
            if loader := (hits := self._requests[name].hits).loader:  # ours looks after its own
                hits.failed.add(loader)
        loaded, sent = output.finished_recving or (), output.finished_sending or ()
        output.finished_recving = {name for name in loaded if self._heard(name, load=True)}
        output.finished_sending = {name for name in sent if self._heard(name, load=False)}

    def _heard(self, name: str, load: bool) -> bool:
        """Note the report that the request's load is over, or that its blocks are free. Whether
        vLLM is to hear of it: the last of both that it waits for."""
        state = self._requests.get(name)
        if state is None or not (state.loading if load else state.holds and not state.sent):
            return False
        if load:
            state.loading = False
        else:
            state.sent = True
        last = not state.loading and (state.sent or not state.holds)
        if last and state.over:
            del self._requests[name]
        return last

    # ---- in a worker

    @guarded(answer(None))
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Raises OthersError."""
        for child in self._others:
            child.begin(kv_caches)
        # Ours last: another one may move a KV cache on a CPU, which ours then refuses.
        self._ours.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._learn(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._learn(connector_metadata)
        self._filling = {}
        if connector_metadata.ends[0]:
            self._ours.open_ends(connector_metadata.ends)
        for name, load in connector_metadata.loads.items():
            if not load.waits:
                self._filling.setdefault(load.child, set()).update(load.blocks)
                continue
            self._running[name] = load
            if self._off(load.child):  # it does not begin
                self._failed.add(name)
                self._over.add(name)
        self._held |= {name: set(held) for name, held in connector_metadata.holds.items()}
        super().bind_connector_metadata(connector_metadata)

    def _must_wait(self) -> bool:
        return bool(self._ours.loads_wait)

    def _filled(self, name: str) -> None:
        """Another connector's load of this request has filled its blocks. In any thread."""
        if (load := self._running.get(name)) is not None and load.number:
            self._ours.put_end(load.number)

    @guarded(answer(None))
    def _learn(self, meta: Any) -> None:
        """Do without what is out of use in the scheduler."""
        if meta.off:
            self.fail("its scheduler's half has failed")
        for child, given in zip(self._connectors, meta.metadata, strict=True):
            if given is None:
                child.fail("its scheduler's half has failed")

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._take_all(finished_req_ids)
        if self._settled:
            self._over = self._failed = set(self._running)
            self._held = {name: set() for name in self._held}
        over, failed = self._over, self._over & self._failed
        sent = {name for name, held in self._held.items() if not held}
        self._running = {name: load for name, load in self._running.items() if name not in over}
        self._held = {name: held for name, held in self._held.items() if held}
        self._over, self._failed = set(), self._failed - failed
        results = compat.transfer_results(over, failed)
        results.finished_sending = sent
        return results

    @guarded(answer(None))
    def _take_all(self, finished: set[str]) -> None:
        """Take each connector's reports of what it loads and of the blocks that it holds."""
        for number, child in enumerate(self._connectors):
            own = {name for name, load in self._running.items() if load.child == number}
            off = self._off(number)
            found = (child.poll if number else child.get_transfer_results)(finished)
            over = own & (found.finished_recving | found.failed_recving)
            self._failed |= own if off else own & found.failed_recving
            self._note_invalid(number, child.get_block_ids_with_load_errors())
            # LMCache may report one of both for a request that was aborted during its load.
            told = found.finished_sending | over
            if off and monotonic() > child.off_at + TRANSFER_SECONDS:
                over, told = own, self._held.keys()
            self._over |= over
            for name in told & self._held.keys():
                self._held[name].discard(number)

    def _off(self, number: int) -> bool:
        """Whether a connector does not load what the scheduler has it load."""
        return bool(self.off or (number and self._connectors[number].off_at))

    def _note_invalid(self, number: int, blocks: Iterable[int]) -> None:
        """Note blocks that a connector says it has not filled, of its own loads only.

        A load beside the steps that has failed is reported by request, which vLLM then begins anew:
        otherwise other connectors would take the tokens behind the failed block for computed, and
        store what was never written."""
        blocks = set(blocks)
        self._invalid |= blocks & self._filling.get(number, set())
        for name, load in self._running.items() if blocks else ():
            if load.child == number and not blocks.isdisjoint(load.blocks):
                self._failed.add(name)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid.union(*(self._filling[one] for one in self._filling if self._off(one)))
