"""vLLM's schedulers without a model, for models of all kinds of block tables: three instances
compute, load from one another, fail to, preempt, abort and reset at random.

A KV cache holds a number for each token, of it and all before it. What a request attends to, what
vLLM finds in its prefix cache and what is published must have the right ones after every step. The
number's last four bits tell the resets by which it was computed, and what is published builds on
nothing of before the last one, though vLLM's own cache may after a reset that vLLM refuses. A
load's copy runs some steps after it was planned, and is judged some steps later, while the blocks
that it reads are handed out again."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from vcache_backend.integration.vllm.metadata import (
    LoadSpec,
    PublicationSpec,
    StepMetadata,
    WorkerReport,
)
from vcache_backend.protocol.messages import HASH_BYTES, ResidentRun
from vcache_backend.transfer.keys import tail_hash

from .ahead import Ahead
from .scheduling import Instance, Place, Tables, full, local, serving, state, window

MODELS = {
    "dense": Tables([full(32)]),
    "gpt-oss": Tables([full(), window(128)]),
    "gemma3": Tables([full(), *[window(200)] * 3], 256),
    "sizes": Tables([full(32), window(100), window(4, 4)], None),
    "v4": Tables([window(128, 64), full(128), window(64, 8)]),
    "window": Tables([window(100)]),
    "state": Tables([full(32), *[state(32)] * 3]),
    "states": Tables([full(64), state(64)], None),
    "checkpoints": Tables([state(64, checkpoints=True), full(64)]),
    "mixed": Tables([state(32), full(32), window(96, 32)], 64),
    "local": Tables([full(), local(128)]),
    "tails": Tables([full(32)]),
}
ROLES = {"tails": ("kv_producer", "kv_both", "kv_consumer")}
"""Of a model's instances, if not all compute and load: the last one loads prompts to their last
token."""
TURNS, ROOM = 500, 900
"""Steps of a run, and the tokens that an instance's blocks hold, in each table."""


@dataclass
class Copy:
    """A copy of a load. begins, ends: from which turn on it runs, and is judged."""

    runs: list[ResidentRun]
    begins: int
    ends: int
    begun: bool = False


@dataclass
class Load:
    """A load under way. coming: its copies that are not judged. filled: its right blocks. open:
    there may be more copies."""

    spec: LoadSpec
    coming: list[Copy]
    filled: Any
    open: bool


STALE = 15
"""In place of a turn, of what builds on what is of before a reset."""


class Due(NamedTuple):
    """A block that was published with this generation, and what it should hold."""

    block: int
    generation: int
    holds: Any


class Written(Instance):
    """Which token each place of its KV cache stands for, with all before it and the block table;
    of a state, the last one that it has seen; with the turn of resets, or `STALE`. 0 where that is
    nobody's."""

    def __init__(
        self,
        where: Place,
        undo: ExitStack,
        tables: Tables,
        blocks: int,
        choice: random.Random,
        role: str,
    ) -> None:
        self.choice = choice
        policy = choice.choice(["fcfs", "fcfs", "priority"])
        steps = {
            "max_num_batched_tokens": choice.choice([128, 320, 640]),
            "scheduling_policy": policy,
        }
        if policy == "priority":
            steps["long_prefill_token_threshold"] = 128
        super().__init__(where, undo, tables, blocks, steps, role)
        self.counters = self.half.publications.generations.counters
        self.wide = max(spec.block_size for spec in tables.specs)
        self.hash_size = self.manager.coordinator.block_pool.hash_block_size
        self.holds = np.zeros((blocks, self.wide), dtype=np.int64)
        self.named = dict[Any, Any]()
        """What should lie in a block, by its table and the hash by which vLLM finds it."""
        self.told = dict[int, Due]()
        self.loads = list[Load]()
        self.resets, self.epochs = 0, [self.half.context.news.epoch]
        """This instance's, and the namespace's epochs that it has heard of."""
        self.seen = Counter[str]()
        allocate = self.manager.allocate_slots

        def scarce(request: Any, *given: Any, **more: Any) -> Any:
            runs = request.status == RequestStatus.RUNNING and len(self.scheduler.running) > 1
            return None if runs and choice.random() < 0.05 else allocate(request, *given, **more)

        self.manager.allocate_slots = scarce

    def sampled(self, request: Any) -> int:
        return self.choice.randrange(3, 1000)

    def request(self, *given: Any, **more: Any) -> Any:
        """By priority, a step may be taken away from one that was planned before."""
        made = super().request(*given, **more)
        made.priority = self.choice.randrange(4)
        return made

    # ---- what a model does

    def end(self, output: Any, **said: Any) -> None:
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            rows = self.manager.get_block_ids(name)
            stop = request.num_computed_tokens
            read = [self.read(request, table, row, stop - count) for table, row in enumerate(rows)]
            turns = {int(turn) for lies in read for turn in lies % 16}
            turn = self.turn if turns <= {self.turn} else STALE
            self.seen["stale"] += turn == STALE
            for table, row in enumerate(rows):
                self.write(request, table, row, stop - count, stop, turn)
        self.name_all()
        for block in self.manager.block_pool.blocks:
            if block.block_hash is not None:
                due = self.named[block.block_hash]
                assert self.has(block.block_id, due), f"vLLM finds block {block.block_id}"
        super().end(output, **said)

    @property
    def turn(self) -> int:
        """Of resets, this instance's and those that it has heard of."""
        return (self.resets + len(self.epochs)) % STALE

    def planned(self, output: Any) -> None:
        epoch = self.half.context.news.epoch
        self.epochs += [epoch] * (epoch != self.epochs[-1])

    def reset(self, everywhere: bool) -> None:
        """vLLM refuses it where requests run. everywhere: of the namespace."""
        self.resets += 1
        self.scheduler.reset_prefix_cache(reset_connector=everywhere)
        self.seen["reset"] += 1

    def read(self, request: Any, table: int, row: list[int], start: int) -> Any:
        """What the request's next token attends to, which is right."""
        spec, due = self.tables.specs[table], standing_for(request, table)
        first = 0
        if isinstance(spec, MambaSpec):
            if start:
                lies = self.holds[row[(start - 1) // spec.block_size], :1]
                assert lies // 16 * 16 == due[start - 1], (request.request_id, table, start)
                return lies
            return due[:0]
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        at = np.arange(first, start)
        lies = self.holds[np.array(row)[at // spec.block_size], at % spec.block_size]
        assert (lies // 16 * 16 == due[at]).all(), (request.request_id, table, start)
        return lies

    def write(
        self, request: Any, table: int, row: list[int], start: int, stop: int, turn: int
    ) -> None:
        spec, due = self.tables.specs[table], standing_for(request, table) + turn
        if isinstance(spec, MambaSpec):
            size = spec.block_size
            # Of those before the last block vLLM has one for a checkpoint at most.
            for end in [*range((start // size + 1) * size, stop, size), stop]:
                if block := row[(end - 1) // size]:
                    self.holds[block] = due[end - 1]
            return
        at = np.arange(start, stop)
        self.holds[np.array(row)[at // spec.block_size], at % spec.block_size] = due[at]

    def name_all(self) -> None:
        """Note what each hash of the requests stands for."""
        for request in self.scheduler.requests.values():
            for table, spec in enumerate(self.tables.specs):
                due, size = standing_for(request, table), spec.block_size
                scale = size // self.hash_size
                for number, name in enumerate(request.block_hashes[scale - 1 :: scale]):
                    first = number * size
                    own = due[first + isinstance(spec, MambaSpec) * (size - 1) : first + size]
                    key = kv_cache_utils.make_block_hash_with_group_id(name, table)
                    self.named[key] = self.named[table, bytes(name[:HASH_BYTES])] = own
            if self.half.context.tails:
                self.name_tail(request)

    def name_tail(self, request: Any) -> None:
        """Note what the name of its prompt's last tokens stands for."""
        tokens, size = request.num_prompt_tokens, self.hash_size
        if whole := tokens // size:
            behind = request.all_token_ids[whole * size : tokens - 1]
            name = tail_hash(request.block_hashes[whole - 1], behind)[:HASH_BYTES]
            self.named[0, name] = standing_for(request, 0)[whole * size : tokens - 1]

    def has(self, block: int, due: Any, *turns: int) -> bool:
        """turns: one of these, if any are given."""
        lies = self.holds[block, : len(due)]
        return bool(
            (lies // 16 * 16 == due).all() and (not turns or np.isin(lies % 16, turns).all())
        )

    # ---- what workers do

    def publish(self, specs: Sequence[PublicationSpec]) -> list[int]:
        """Note what should lie where, of what the server takes: nothing of before a reset."""
        taken = super().publish(specs)
        for run in (
            run for spec, count in zip(specs, taken, strict=True) if count for run in spec.runs
        ):
            blocks = np.frombuffer(run.blocks, dtype="<u4").tolist()
            generations = np.frombuffer(run.generations, dtype="<u8").tolist()
            for at, both in enumerate(zip(blocks, generations, strict=True)):
                name = run.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
                if (due := self.named.get((run.table, name))) is not None:
                    self.told[both[0]] = Due(*both, due)
                    self.seen["published"] += 1
                    self.seen["tails"] += len(due) < self.hash_size
        return taken

    def check_told(self) -> None:
        """A block whose generation is as published holds what was published."""
        for due in self.told.values():
            if int(self.counters[due.block]) == due.generation:
                assert self.has(due.block, due.holds, self.turn), f"published: block {due.block}"
                self.seen["held"] += 1

    def advance(self, turn: int, owners: dict[bytes, Written], compares: bool) -> dict[str, Any]:
        """Loads go on; what the worker reports."""
        over, failed, invalid = set[str](), set[str](), set[int]()
        for load in list(self.loads):
            for copy in list(load.coming):
                if turn >= copy.begins and not copy.begun:
                    self.copy(load, copy, owners, compares)
                    copy.begun = True
                if turn >= copy.ends:
                    load.coming.remove(copy)
                    for run in copy.runs:
                        right = owners[bytes(run.instance)].right(run)
                        load.filled[run.first] |= right or not compares
            ends = load.spec.request_id not in self.scheduler.requests or not load.open
            if ends and not load.coming:
                self.loads.remove(load)
                over.add(load.spec.request_id)
                if not load.filled.all():
                    failed.add(load.spec.request_id)
                    left = load.spec.blocks[int(np.argmin(load.filled)) :]
                    invalid |= {block for block in left if block >= 0}
                elif load.spec.request_id in self.scheduler.requests:
                    ends = self.scheduler.requests[load.spec.request_id].num_computed_tokens
                    self.seen["to the last token"] += ends % self.hash_size > 0
        self.seen["loaded"] += len(over - failed)
        self.seen["refused"] += len(failed)
        report = WorkerReport(failed=set(failed))
        said = {"finished_recving": over, "kv_connector_worker_meta": report}
        # As a worker does, which reports a window's load by its request (`groups.several`).
        by_block = self.half.context.groups.plain and self.choice.random() < 0.5
        return said | ({"invalid_block_ids": invalid} if by_block else {"failed_recving": failed})

    def begin(self, meta: StepMetadata, turn: int) -> None:
        """The loads of a step, and what comes for those that are open."""
        for spec in meta.loads:
            filled = np.array(spec.blocks) < 0
            self.loads.append(Load(spec, [self.queued(spec.residents, turn)], filled, spec.open))
            self.seen["opened"] += spec.open
        for more in meta.more:
            for load in self.loads:
                if load.spec.number == more.number:
                    load.coming.append(self.queued(more.residents, turn))
                    load.open = not more.last
                    self.seen["more"] += bool(more.residents)

    def queued(self, runs: list[ResidentRun], turn: int) -> Copy:
        begins = turn + self.choice.choice([1, 1, 3])
        return Copy(runs, begins, begins + self.choice.choice([0, 1, 9]))

    def copy(self, load: Load, copy: Copy, owners: dict[bytes, Written], compares: bool) -> None:
        """Each block from the first place where it has not changed."""
        into = np.array(load.spec.blocks)
        runs, copy.runs, lacking = copy.runs, [], into >= 0
        for run in runs:
            for at in range(run.first, run.stop):
                one, owner = run.cut(at, at + 1), owners[bytes(run.instance)]
                if lacking[at] and (owner.right(one) or not compares):
                    (block,) = np.frombuffer(one.blocks, dtype="<u4")
                    lies = owner.holds[block]
                    alike = owner.epochs[-1] == self.epochs[-1]
                    turn = np.where(alike & (lies % 16 == owner.turn), self.turn, STALE)
                    self.holds[into[at]] = lies // 16 * 16 + turn
                    lacking[at] = False
                    copy.runs.append(one)

    def right(self, run: ResidentRun) -> bool:
        """Whether a block still has its generation."""
        blocks = np.frombuffer(run.blocks, dtype="<u4")
        return bool((self.counters[blocks] == np.frombuffer(run.generations, dtype="<u8")).all())


def standing_for(request: Any, table: int) -> Any:
    """A number for each token with all before it, in a block table."""

    def with_next(last: int, token: int) -> int:
        return hash((last, token)) // 16 * 16

    numbers = itertools.accumulate(request.all_token_ids, with_next, initial=table + 1)
    return np.fromiter(numbers, dtype=np.int64)[1:]


class Planned:
    """Three instances compute, load from one another, fail to, preempt, abort and reset at
    random."""

    def __init__(self, where: Place, model: str, undo: ExitStack, seed: str) -> None:
        self.choice, tables = random.Random(seed), MODELS[model]
        blocks = sum(ROOM // spec.block_size for spec in tables.specs) + 8
        roles = ROLES.get(model, ("kv_both",) * 3)
        made = [Written(where, undo, tables, blocks, self.choice, role) for role in roles]
        self.repeats = 0.6 if model in ROLES else 0.0
        self.asked = [self.some(9)]
        self.all = {bytes(one.name): one for one in made}
        self.edges = sorted({16, 256, *(spec.block_size for spec in tables.specs)})
        self.heads = [self.some(self.choice.randrange(40, 700)) for _ in range(3)]

    def some(self, count: int) -> list[int]:
        return self.choice.choices(range(3, 1000), k=count)

    def prompt(self) -> list[int]:
        """Of a head a part, often up to a block's end, or one token before or after it."""
        choice, head = self.choice, self.choice.choice(self.heads)
        if choice.random() < self.repeats:
            return choice.choice(self.asked)
        edge = choice.choice(self.edges)
        common = choice.choice([len(head), choice.randrange(len(head) + 1)])
        if choice.random() < 0.5:
            common = max(0, common // edge * edge + choice.choice([-1, 0, 0, 1]))
        made = head[:common] + self.some(choice.choice([1, 1, 5, 90, 200]))
        self.asked = [*self.asked[-5:], made]
        return made

    def run(self, turns: int, compares: bool = True) -> Counter[str]:
        """compares: loads of changed blocks fail. AssertionError where something is wrong."""
        choice = self.choice
        for turn in range(turns):
            if turn % 40 == 0:
                self.heads = [*self.heads[1:], self.some(choice.randrange(40, 700))]
            engine = choice.choice(list(self.all.values()))
            requests = engine.scheduler.requests
            if len(requests) < 4 and choice.random() < 0.8:
                engine.add(self.prompt(), choice.choice([1, 1, 2, 40]))
            if requests and choice.random() < 0.02:
                gone = choice.choice(list(requests))
                engine.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
                engine.seen["aborted"] += 1
            if choice.random() < 0.004:
                engine.reset(everywhere=choice.random() < 0.5)
            meta = engine.step(**engine.advance(turn, self.all, compares))
            engine.seen["preempted"] += sum(one.num_preemptions for one in requests.values())
            engine.begin(meta, turn)
            engine.check_told()
        return sum((one.seen for one in self.all.values()), Counter[str]())


def main(seconds: float, seed: int) -> int:
    """The level: for so long, each model in turn, and each model's control. 1 if something was
    wrong, or a control saw nothing."""
    with serving() as where:
        seen, wrong, until = Counter[str](), list[str](), time.monotonic() + seconds
        for run in itertools.count():
            for kind in (*MODELS, "pool", "in_place"):
                with ExitStack() as ends:
                    make = Planned if kind in MODELS else Ahead
                    made = make(where, kind, ends, f"{seed} {run} {kind}")
                    try:
                        seen += made.run(TURNS)
                    except AssertionError as error:
                        wrong.append(f"{kind}, run {run} of seed {seed}: {error}")
            print(f"{run}: {dict(seen)}", file=sys.stderr)
            if time.monotonic() > until:
                break
        blind = [model for model in MODELS if not caught(where, model, str(seed))]
    print(f"planned: seed {seed}, {dict(seen)}; wrong: {wrong}; controls that saw nothing: {blind}")
    return int(bool(wrong or blind))


def caught(where: Place, model: str, seed: str, attempts: int = 5) -> bool:
    """The control: whether it is seen that loads of changed blocks count."""
    for attempt in range(attempts):
        with ExitStack() as ends:
            made = Planned(where, model, ends, f"{seed} control {attempt} {model}")
            try:
                made.run(TURNS, compares=False)
            except AssertionError:
                return True
    return False
