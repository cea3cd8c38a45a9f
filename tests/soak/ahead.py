"""vLLM's scheduler where it plans steps before earlier ones are over, without a model: a load begins
at once, so no step under way may use its blocks, and if a store reads them, the step's workers must
hear of it.

An instance stores and loads, and at random another connector loads, loads fail, and requests are
preempted, aborted and reset. A step is under way from its plan on, and a load or a store from its
step on, each for some turns.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from benchmarks.processes import PATIENT
from benchmarks.vllm.settings import our_connector
from vcache_backend.integration.vllm.metadata import PublicationSpec, StepMetadata, WorkerReport
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import Publish, SegmentId, SegmentInfo
from vcache_backend.vram_pool import host_memory

from .scheduling import Place, Planned, Tables, full

BLOCK, CHUNK, BLOCKS, POOL_BYTES, AHEAD = 32, 64, 30, 1 << 20, 3
"""AHEAD: the most steps under way."""
SLOT_BYTES = 1024
STOP = 7
_numbers = itertools.count()


class Step(NamedTuple):
    """used: the blocks that it may read or write. samples: requests that get a token."""

    output: Any
    used: frozenset[int]
    samples: set[str]


class Copy(NamedTuple):
    """A load or a store of a request. until: the turn after which it is over. saved: the
    generations of published blocks, by block; what has lost one is not kept."""

    request: str
    blocks: frozenset[int]
    until: int
    saved: dict[int, int]


class Ahead(Planned):
    """seen: what has happened."""

    def __init__(self, where: Place, share: str, undo: ExitStack, seed: str) -> None:
        """share: `pool`, or `in_place`, with a pool beside."""
        self.choice, self.seen, self.turn = random.Random(seed), Counter[str](), 0
        told = {"connector.share": share, "connector.min_hit_tokens": "1"}
        # The model is written while this process runs.
        told |= {"connector.model": "tiny", "client.request_seconds": "10"}
        lends = POOL_BYTES if share == "in_place" else 0
        transfer = our_connector(where.socket, lends, CHUNK, told) | {"kv_role": "kv_both"}
        given: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256}
        given |= {"scheduling_policy": self.choice.choice(["fcfs", "priority"])}
        tables = Tables([full(BLOCK)], None)
        super().__init__(undo, transfer, where.model, tables, BLOCKS, given, AsyncScheduler)
        self.client = undo.enter_context(Client(where.socket, PATIENT))
        self.lend(undo)
        if lends:
            self.show(self.client, BLOCKS, undo)
        self.steps, self.loads, self.stores = deque[Step](), list[Copy](), list[Copy]()
        self.heads = [self.some(400) for _ in range(4)]
        self.others = dict[str, int]()
        """What another connector loads: from which token on, by request."""
        self.manager = self.scheduler.kv_cache_manager
        self.bring()
        allocate = self.manager.allocate_slots

        def scarce(request: Any, *given: Any, **more: Any) -> Any:
            runs = request.status == RequestStatus.RUNNING and len(self.scheduler.running) > 1
            lacks = runs and self.choice.random() < 0.1
            return None if lacks else allocate(request, *given, **more)

        self.manager.allocate_slots = scarce

    def bring(self) -> None:
        """Another connector has something of some requests, as VCacheMultiConnector has it."""
        connector: Any = self.scheduler.connector
        matched, allocated = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
        )

        def or_others(request: Any, local: int) -> Any:
            found, most = matched(request, local), (request.num_tokens - 1 - local) // BLOCK
            self.others.pop(request.request_id, None)
            if found != (0, False) or not most or self.choice.random() < 0.8:
                return found
            self.others[request.request_id] = local
            return self.choice.randint(1, most) * BLOCK, True

        def ours(request: Any, blocks: Any, external: int) -> None:
            allocated(request, blocks, 0 if request.request_id in self.others else external)

        connector.get_num_new_matched_tokens = or_others
        connector.update_state_after_alloc = ours

    def lend(self, undo: ExitStack) -> None:
        name, memory = SegmentId(f"ahead-{next(_numbers)}"), host_memory.allocate("a", POOL_BYTES)
        undo.callback(os.close, memory)
        info = SegmentInfo(name, "host", "host", POOL_BYTES)
        os.close(self.client.add_segment(info, memory)[1])
        undo.callback(self.client.drop_segment, name)

    def some(self, count: int) -> list[int]:
        return self.choice.choices(range(STOP + 1, 1000), k=count)

    def row(self, name: str) -> list[int]:
        """The request's blocks."""
        (row,) = self.manager.get_block_ids(name)
        return row  # type: ignore[no-any-return]

    # ---- a step

    def planned(self, output: Any) -> None:
        """Its worker begins it: its loads, and once it is launched, its stores."""
        meta, requests = output.kv_connector_metadata, self.scheduler.requests
        names = list(output.num_scheduled_tokens)
        used = frozenset(block for name in names for block in self.row(name))
        samples = {name for name in names if not requests[name].is_prefill_chunk}
        self.steps.append(Step(output, used, samples))
        loads = [self.copy(load.request_id, load.blocks) for load in meta.loads]
        waiting = {
            name: local
            for name, local in self.others.items()
            if name in requests and requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        loads += [self.copy(name, self.row(name)[at // BLOCK :]) for name, at in waiting.items()]
        self.others = {name: at for name, at in self.others.items() if name not in waiting}
        for load in loads:
            self.check(load, meta)
            self.loads.append(load)
        stores = [self.copy("", spec.blocks) for spec in meta.stores]
        for load in self.loads:
            assert load.blocks.isdisjoint(used), "a step uses blocks that a load fills"
            for store in stores:
                assert load.blocks.isdisjoint(store.blocks), "a store reads what a load fills"
        self.stores += stores
        for spec in meta.stores:
            self.keep(spec.chunks.keys)
        if meta.victims is not None:
            self.save(meta.victims)
        self.seen["loads"] += len(loads)
        self.seen["others' loads"] += len(waiting)
        self.seen["loads behind steps"] += len(loads) * (len(self.steps) > 1)
        self.seen["preempted"] += len(output.preempted_req_ids or ())

    def check(self, load: Copy, meta: StepMetadata) -> None:
        """A load begins."""
        for step in self.steps:
            assert load.blocks.isdisjoint(step.used), "a step under way uses a load's blocks"
        for other in self.loads:
            assert load.blocks.isdisjoint(other.blocks), "two loads fill a block"
        for store in self.stores:
            if both := load.blocks & store.blocks:
                self.seen["loads over stores"] += 1
                if store.saved:
                    now = self.half.publications.generations.counters
                    dropped = any(int(now[block]) != store.saved[block] for block in both)
                    assert dropped, "a save is kept that a load overwrites"
                else:
                    waits = any(not store.blocks.isdisjoint(blocks) for blocks in meta.fresh)
                    assert waits, "no step waits for a store that a load overwrites"

    def copy(
        self, request: str, blocks: Sequence[int], saved: dict[int, int] | None = None
    ) -> Copy:
        until = self.turn + self.choice.choice([0, 1, 2, 5, 15])
        return Copy(request, frozenset(blocks) - {-1}, until, saved or {})

    def save(self, victims: Any) -> None:
        blocks = np.frombuffer(victims.blocks, dtype="<u4").tolist()
        generations = np.frombuffer(victims.generations, dtype="<u8").tolist()
        saved = dict(zip(blocks, generations, strict=True))
        self.stores.append(self.copy("", blocks, saved))
        self.keep(victims.keys)

    def keep(self, keys: list[Any]) -> None:
        """They are in the pool."""
        reserved = self.client.reserve(keys, SLOT_BYTES)
        if reserved.reservation:
            self.client.commit(reserved.reservation)

    def publish(self, specs: Sequence[PublicationSpec]) -> None:
        for spec in specs:
            self.client.publish(Publish(self.name, 0, spec.runs, spec.epoch))

    def model_output(self, output: Any) -> ModelRunnerOutput:
        made, samples = super().model_output(output), self.steps[0].samples
        made.sampled_token_ids = [
            [self.choice.choice([STOP, 8, 8])] if name in samples else [] for name in made.req_ids
        ]
        return made

    def over(self) -> None:
        """The first step under way is over, with what its worker reports of loads: one of each
        request."""
        ended = {load.request: load for load in reversed(self.loads) if load.until < self.turn}
        self.loads = [load for load in self.loads if ended.get(load.request) is not load]
        self.stores = [store for store in self.stores if store.until >= self.turn]
        failed, invalid = set[str](), set[int]()
        for name in sorted(ended.keys() & self.scheduler.requests.keys()):
            if (how := self.choice.random()) < 0.1:
                failed.add(name)
            elif how < 0.2:
                row = [block for block in self.row(name) if block in ended[name].blocks]
                invalid |= {*row[self.choice.randrange(len(row)) :]}
        report = WorkerReport({*failed, *(name for name in ended if ended[name].blocks & invalid)})
        self.seen["failed"] += len(report.failed)
        output = self.steps[0].output
        report.echoes |= output.kv_connector_metadata.echoes
        said: dict[str, Any] = {"finished_recving": {*ended}, "failed_recving": failed}
        said |= {"invalid_block_ids": invalid, "kv_connector_worker_meta": report}
        self.end(output, **said)
        self.steps.popleft()

    # ---- what happens

    def run(self, turns: int) -> Counter[str]:
        """AssertionError where something is wrong. Returns `seen`."""
        choice, requests = self.choice, self.scheduler.requests
        for self.turn in range(turns):
            if off := self.scheduler.connector.off:
                raise RuntimeError(f"the connector has given up: {off}")
            if len(requests) < 5 and choice.random() < 0.7:
                head = choice.choice(self.heads)
                tokens = head[: choice.randrange(len(head) + 1)] + self.some(choice.choice([1, 30]))
                asked = self.request(tokens, choice.choice([1, 3, 40]), choice.randrange(3))
                asked.sampling_params.stop_token_ids = [STOP]
                self.scheduler.add_request(asked)
            if requests and choice.random() < 0.08:
                gone = choice.choice(list(requests))
                self.seen["aborted loads"] += any(load.request == gone for load in self.loads)
                self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            if choice.random() < 0.01:
                with suppress(RuntimeError):  # vLLM's, where blocks are in use all the same
                    self.scheduler.reset_prefix_cache(reset_running_requests=choice.random() < 0.7)
            if self.steps and (len(self.steps) == AHEAD or choice.random() < 0.4):
                self.over()
            else:
                self.planned(self.scheduler.schedule())
        return self.seen
