"""What the engine's tests share: KV caches with known content, a node with a real server, worker processes, one cross-process scenario.

The content of a token's KV is a function of (token, layer) and nothing else, so any process can check any byte. Caches are
filled and checked through their axes as vLLM names them, never through the code under test.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import processes
import torch
from nursery import listen, say
from processes import HASTY, PATIENT, SECONDS, Child, Stage, nursery

from vcache_backend.config import ByteSize, ClientConfig, Config, EngineConfig, PoolConfig, ServerConfig
from vcache_backend.demo.content import mix
from vcache_backend.engine import VCacheEngine
from vcache_backend.metadata_server.client import Client
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copier import Copier, Finished, HostCopier, Mark
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView

CHUNK = 32
POISON = 0xA5
SNAPPY = msgspec.structs.replace(HASTY, connect_seconds=1.0, request_seconds=1.0, control_seconds=2.0)
"""For engines whose server hangs: every call costs a second. Where it only dies and comes back, QUICK is enough."""


# ---- KV caches


class Sizes(NamedTuple):
    """How large a KV cache is; small by default."""

    layers: int = 3
    heads: int = 4
    dim: int = 16
    blocks: int = 24
    block_size: int = 16


SMALL = Sizes()


class Arrangement(NamedTuple):
    """A KV layout of vLLM. axes: of the tensor. memory: the same axes, outermost first, where strides differ from shapes.

    packed: K and V lie in one row of `dim`.
    """

    name: str
    axes: str
    memory: str = ""
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False


FLASH = Arrangement("flash", "part block token head dim")
MLA = Arrangement("mla", "block token dim")
PACKED = Arrangement("packed-nhd", "block head token dim", "block token head dim", packed=True)
PACKED_HND = Arrangement("packed-hnd", "block head token dim", packed=True)
ARRANGEMENTS = [
    FLASH,
    Arrangement("flash-hnd", "part block token head dim", "part block head token dim"),
    Arrangement("flashinfer", "block part token head dim"),
    Arrangement("flashinfer-hnd", "block part token head dim", "block part head token dim"),
    Arrangement("triton-hnd", "block part head token dim"),
    Arrangement("part-first-hnd", "part block head token dim"),
    PACKED,
    PACKED_HND,
    Arrangement("heads-last", "block token head dim"),
    MLA,
    Arrangement("flash-fp16", "part block token head dim", dtype=torch.float16),
    Arrangement("flash-fp8", "part block token head dim", dtype=torch.float8_e4m3fn),
    Arrangement("mla-fp8", "block token dim", dtype=torch.uint8),
]


def content(tokens: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """The bytes (tokens, width) that one layer of a KV cache holds for these tokens; every bit depends on token, layer and place."""
    words = -(-width // 8)
    place = torch.arange(words, device=tokens.device)
    seeds = mix(tokens[:, None] * 0x9E3779B1 + layer * 0x85EBCA77)
    return mix(seeds + place * 0xC2B2AE3D + 1).view(torch.uint8)[:, :width]


def prompt(count: int, family: int = 1) -> torch.Tensor:
    """`count` tokens; prompts of one family are prefixes of one another, and no token is in two families."""
    return torch.arange(count) + family * 1_000_000


def places(sizes: Sizes, count: int, seed: int = 0) -> torch.Tensor:
    """Slots of `count` tokens in blocks that lie anywhere, the last one possibly partial."""
    blocks = list(range(sizes.blocks))
    random.Random(seed).shuffle(blocks)
    taken = torch.tensor(blocks[: -(-count // sizes.block_size)], dtype=torch.int64)
    return (taken[:, None] * sizes.block_size + torch.arange(sizes.block_size)).reshape(-1)[:count]


class Cache:
    """A paged KV cache, poisoned when new. `tensors` is what the engine gets: one a layer."""

    def __init__(self, arrangement: Arrangement = FLASH, sizes: Sizes = SMALL, device: str = "cpu") -> None:
        self.arrangement, self.sizes = arrangement, sizes
        axes = arrangement.axes.split()
        memory = (arrangement.memory or arrangement.axes).split()
        item = arrangement.dtype.itemsize
        length = {"part": 2, "block": sizes.blocks, "token": sizes.block_size, "head": sizes.heads}
        length["dim"] = sizes.dim * item * (2 if arrangement.packed else 1)
        where = torch.device(device if device.startswith("cuda") else "cpu")
        self._memory = [torch.empty([length[a] for a in memory], dtype=torch.uint8, device=where) for _ in range(sizes.layers)]
        order = [memory.index(axis) for axis in axes]
        self.tensors = [raw.view(arrangement.dtype).permute(order) for raw in self._memory]
        first = [memory.index("block"), memory.index("token")]
        self._rows = [raw.permute(first + [a for a in range(len(memory)) if a not in first]) for raw in self._memory]
        self.poison()

    def copy(self) -> Cache:
        """The bytes as they are now, that is as the current stream's next kernel sees them."""
        other = Cache(self.arrangement, self.sizes, str(self._memory[0].device))
        for mine, theirs in zip(self._memory, other._memory, strict=True):
            theirs.copy_(mine)
        return other

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.sizes.layers * math.prod(self._rows[0].shape[2:])

    @property
    def chunk_bytes(self) -> int:
        return CHUNK * self.token_bytes

    def poison(self, value: int = POISON) -> None:
        for raw in self._memory:
            raw.fill_(value)

    def fill(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """What prefill does: the KV of `tokens` is in their slots afterwards."""
        tokens, slots = self.here(tokens), self.here(slots)
        for layer, rows in enumerate(self._rows):
            rest = rows.shape[2:]
            kv = content(tokens, layer, math.prod(rest))
            rows[slots // self.sizes.block_size, slots % self.sizes.block_size] = kv.view(len(tokens), *rest)

    def wrong(self, tokens: torch.Tensor, slots: torch.Tensor) -> int:
        """How many bytes in `slots` are not the KV of `tokens`."""
        tokens = self.here(tokens)
        count = torch.zeros((), dtype=torch.int64, device=tokens.device)
        for layer, rows in enumerate(self._at(slots)):
            count += (rows != content(tokens, layer, rows.shape[1])).sum()
        return int(count)

    def digest(self, slots: torch.Tensor) -> str:
        """Of the bytes in `slots`, token by token, all layers: equal for two caches that hold the same KV."""
        digest = blake2b(digest_size=16)
        for rows in self._at(slots):
            digest.update(rows.cpu().numpy().tobytes())
        return digest.hexdigest()

    def holds_only(self, tokens: torch.Tensor, slots: torch.Tensor) -> bool:
        """Every byte of the whole cache: the KV of `tokens` in `slots`, poison everywhere else."""
        expected = Cache(self.arrangement, self.sizes, str(self._memory[0].device))
        expected.fill(tokens, slots)
        return all(torch.equal(mine, theirs) for mine, theirs in zip(self._memory, expected._memory, strict=True))

    def _at(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        slots = self.here(slots)
        for rows in self._rows:
            yield rows[slots // self.sizes.block_size, slots % self.sizes.block_size].flatten(1)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the cache's device."""
        return tensor.to(self._memory[0].device)


def layout_of(cache: Cache, chunk_size: int = CHUNK, **changes: Any) -> Layout:
    """The layout that fits `cache`, but for `changes`."""
    sizes, dtype = cache.sizes, str(cache.arrangement.dtype).removeprefix("torch.")
    fields: dict[str, Any] = {
        "model": "test",
        "dtype": dtype,
        "layers": sizes.layers,
        "kv_heads": sizes.heads,
        "head_dim": sizes.dim,
        "block_size": sizes.block_size,
        "kv_layout": PagedKV.describe(cache.tensors, sizes.block_size).name,
        "chunk_size": chunk_size,
    }
    return Layout(**fields | changes)


# ---- copiers that tests control


class PausingCopier(HostCopier):
    """Stops in the middle of the next copy, after `pause()`: a store with half of each slot written, a load before its first byte.

    It calls `wait` there, in the thread that copies.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.armed = False

    def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Finished:
        whole = [torch.empty_like(slot.tensor) for slot in slots]
        finished = super().gather(kv, plan, [SlotView.over(tensor, local=True) for tensor in whole], after)
        for slot, tensor in zip(slots, whole, strict=True):
            slot.tensor[: slot.nbytes // 2] = tensor[: slot.nbytes // 2]
        self._pause()
        for slot, tensor in zip(slots, whole, strict=True):
            slot.tensor[slot.nbytes // 2 :] = tensor[slot.nbytes // 2 :]
        return finished

    def scatter(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Finished:
        self._pause()
        return super().scatter(kv, plan, slots, after)

    def _pause(self) -> None:
        if self.armed:
            self.armed = False
            self._wait()


class UnfinishedCopier(HostCopier):
    """Its stores are complete only once `finished` is set: the bytes are in place, the device has not said so."""

    def __init__(self) -> None:
        self.finished = threading.Event()

    def gather(  # type: ignore[override]
        self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None
    ) -> Copied:
        super().gather(kv, plan, slots, after)
        return Copied(self.finished)


class Copied:
    """A completion that waits for an event of a test."""

    seconds = None

    def __init__(self, finished: threading.Event) -> None:
        self._finished = finished

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)


class WrongCopier(HostCopier):
    """A planted bug: one byte of what it loads is wrong."""

    def scatter(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Finished:
        finished = super().scatter(kv, plan, slots, after)
        kv.pages[-1][int(plan.blocks[-1, 2]), -1] ^= 1
        return finished


class TrustingEngine(VCacheEngine):
    """A planted bug: it does not care whether its lease held."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        verdict = self._session.verdict
        self._session.verdict = lambda lease, end=True: verdict(lease, end) or True  # type: ignore[method-assign]


# ---- worker processes


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with. `copier` and `engine`: the plain ones, or planted ones. visible: the GPUs it sees; empty:
    those that this process sees."""

    config: Config
    arrangement: Arrangement
    sizes: Sizes
    copier: Literal["plain", "pausing", "unfinished", "wrong"] = "plain"
    trusting: bool = False
    visible: str = ""


class WorkerLoop:
    """The inside of a worker process: a cache and an engine. Every method is a command."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        if setup.visible:
            # CUDA looks at it when it is first used, which in a process that was just forked is yet to come.
            os.environ["CUDA_VISIBLE_DEVICES"] = setup.visible
        self.lines = Lines()
        device = setup.config.pool.device
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        self.cache = Cache(setup.arrangement, setup.sizes, device)
        self.pausing, self.unfinished = PausingCopier(self._wait), UnfinishedCopier()
        planted: dict[str, Copier] = {"pausing": self.pausing, "unfinished": self.unfinished, "wrong": WrongCopier()}
        kind = TrustingEngine if setup.trusting else VCacheEngine
        self.engine = kind(setup.config, layout_of(self.cache, setup.config.engine.chunk_size), copier=planted.get(setup.copier))

    def pause(self) -> None:
        """In the next copy."""
        self.pausing.armed = True

    def finish(self) -> None:
        """The device says that the stores are complete."""
        self.unfinished.finished.set()

    def store(self, tokens: torch.Tensor, slots: torch.Tensor) -> str:
        """Prefill and store, with a GPU's stream in a hurry: the kernels that write the KV have not run yet when `store` is
        called, and the blocks are overwritten right behind it. The digest of what was stored."""
        self.cache.fill(tokens, slots)
        digest = self.cache.digest(slots)
        self.cache.poison()
        there = self.cache.here(tokens), self.cache.here(slots)
        if self.engine.device.ordinal is not None:
            torch.cuda._sleep(50_000_000)  # some 30 ms in which the fill below stays queued
        self.cache.fill(*there)
        self.engine.store(tokens, None, self.cache.tensors, slots)
        self.cache.poison()
        return digest

    def flush(self) -> bool:
        return self.engine.flush(SECONDS)

    def lookup(self, tokens: torch.Tensor) -> int:
        return self.engine.lookup(tokens)

    def retrieve(self, tokens: torch.Tensor, slots: torch.Tensor) -> Retrieved:
        """Into a poisoned cache, read by kernels queued right behind; every byte of it is checked."""
        self.cache.poison()
        started = time.perf_counter()
        mask = self.engine.retrieve(tokens, None, self.cache.tensors, slots)
        seconds = time.perf_counter() - started
        seen, here = self.cache.copy(), slots[mask]
        wrong, clean = seen.wrong(tokens[mask], here), seen.holds_only(tokens[mask], here)
        return Retrieved(int(mask.sum()), wrong, clean, seen.digest(here), seconds)

    def stats(self) -> dict[str, Any]:
        return self.engine.get_stats()

    def logs(self) -> list[str]:
        return self.lines.texts

    def soak(self, seed: int, families: int, chunks: int) -> None:
        """Look up, retrieve, check, store, for ever; a `LoadStats` on the pipe after every round."""
        dice = random.Random(seed)
        self.pausing._wait = lambda: time.sleep(dice.uniform(0, 0.05))
        while True:
            tokens = prompt(CHUNK * dice.randint(1, chunks), 1 + dice.randrange(families))
            slots = places(self.cache.sizes, len(tokens), dice.randrange(1 << 30))
            self.cache.poison()
            found = self.engine.lookup(tokens)
            self.pausing.armed = dice.random() < 0.3
            mask = self.engine.retrieve(tokens, None, self.cache.tensors, slots)
            wrong = self.cache.wrong(tokens[mask], slots[mask])
            self.cache.fill(tokens, slots)
            self.pausing.armed = dice.random() < 0.3
            self.engine.store(tokens, mask.logical_not(), self.cache.tensors, slots)
            self.engine.flush(1.0)
            say(LoadStats(1, found, int(mask.sum()), wrong))

    def _wait(self) -> None:
        """Tell the test that the copy is half-way, and go on when it says so."""
        say("paused")
        assert listen(4 * SECONDS) == "resume"


class Retrieved(NamedTuple):
    """wrong: bytes that are not the tokens' KV. clean: nothing else of the cache was touched."""

    tokens: int
    wrong: int
    clean: bool
    digest: str
    seconds: float


class LoadStats(NamedTuple):
    """Counts of the soak: rounds, tokens promised, tokens retrieved, wrong bytes among those."""

    rounds: int = 0
    found: int = 0
    retrieved: int = 0
    wrong: int = 0

    def plus(self, other: LoadStats) -> LoadStats:
        return LoadStats(*(a + b for a, b in zip(self, other, strict=True)))


class Lines(logging.Handler):
    """The log lines of this process, from warnings up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("vcache_backend").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Worker(processes.Worker):
    """A worker process, seen from outside. It has its engine when this returns."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        on_gpu = setup.config.pool.device.startswith("cuda")
        super().__init__(nursery("engine_cases"), WorkerLoop, setup, patience=120.0 if on_gpu else SECONDS, start_seconds=120.0)
        try:
            self.made()
        except BaseException:
            self.close()
            raise

    def until_paused(self, name: str, *arguments: Any) -> None:
        """Start a command whose copy stops half-way, and wait until it has."""
        self.ask("pause")
        self.tell(name, *arguments)
        assert self.answer() == "paused"

    def resume(self) -> None:
        self.say("resume")


# ---- a node


class Node:
    """One node: a real metadata server, engines of this process, worker processes; closed in the right order."""

    def __init__(self, folder: Path, client: ClientConfig = PATIENT) -> None:
        self.stage = Stage(folder)
        self.path = self.stage.path
        self._client = client
        self.undo = ExitStack()

    def serve(self, **options: Any) -> Child:
        """Start (or start again) the server; `options` of its section of the configuration."""
        self.server = self.stage.server(**options)
        return self.server

    def config(self, device: str, segment_bytes: int = 0, chunk_size: int = CHUNK, **engine: Any) -> Config:
        return Config(
            server=ServerConfig(socket=str(self.path)),
            client=self._client,
            pool=PoolConfig(device=device, segment_bytes=ByteSize(segment_bytes)),
            engine=EngineConfig(chunk_size=chunk_size, **engine),
        )

    def engine(self, device: str, segment_bytes: int, layout: Layout, **options: Any) -> VCacheEngine:
        """An engine of this process. options: of the engine section (max_inflight_stores) and of VCacheEngine."""
        section = {name: options.pop(name) for name in EngineConfig.__struct_fields__ if name in options}
        section.setdefault("chunk_size", layout.chunk_size)
        return self.undo.enter_context(VCacheEngine(self.config(device, segment_bytes, **section), layout, **options))

    def worker(
        self,
        device: str,
        segment_bytes: int = 0,
        arrangement: Arrangement = FLASH,
        sizes: Sizes = SMALL,
        chunk_size: int = CHUNK,
        **more: Any,
    ) -> Worker:
        """A worker process on `device`. more: `copier`, `trusting`, `visible` (see Setup)."""
        config = self.config(device, segment_bytes, chunk_size)
        return self.undo.enter_context(Worker(Setup(config=config, arrangement=arrangement, sizes=sizes, **more)))

    def client(self) -> Client:
        """A bystander's connection."""
        return self.stage.client()


@contextmanager
def node(folder: Path, client: ClientConfig = PATIENT) -> Iterator[Node]:
    made = Node(folder, client)
    # These tensors are tiny: a second thread costs milliseconds where others run tests beside these.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with made.stage.undo, made.undo:
        made.undo.callback(torch.set_num_threads, threads)
        yield made


def put(engine: VCacheEngine, cache: Cache, tokens: torch.Tensor, slots: torch.Tensor | None = None, **more: Any) -> None:
    """Prefill into `cache`, store, and wait until it is visible."""
    slots = places(cache.sizes, len(tokens)) if slots is None else slots
    cache.fill(tokens, slots)
    engine.store(tokens, None, cache.tensors, slots, **more)
    assert engine.flush(SECONDS)


def get(engine: VCacheEngine, cache: Cache, tokens: torch.Tensor, seed: int = 1, **more: Any) -> int:
    """Retrieve into poisoned blocks; how many tokens came. Fails unless every byte of the whole cache is as it should be."""
    cache.poison()
    slots = places(cache.sizes, len(tokens), seed)
    mask = engine.retrieve(tokens, None, cache.tensors, slots, **more)
    count = int(mask.sum())
    assert mask[:count].all()
    assert cache.holds_only(tokens[mask], slots[mask])
    return count


# ---- the scenario of the two cross-process scripts


class Step(NamedTuple):
    """One line of a report."""

    right: bool
    text: str


def across(
    folder: Path,
    devices: tuple[str, str],
    arrangement: Arrangement,
    sizes: Sizes,
    count: int,
    chunk_size: int,
    visible: tuple[str, str] = ("", ""),
) -> Iterator[Step]:
    """Two worker processes, one on each device, share `count` tokens each way; then one is killed and its successor reads on.

    Every retrieval goes into poisoned blocks, is checked byte by byte, and compared with the digest of what its writer had.
    """
    token_bytes = Cache(arrangement, sizes._replace(blocks=1)).token_bytes
    segment_bytes = max(4 * count * token_bytes, 1 << 20)
    with node(folder) as here:
        here.serve()

        def start(number: int) -> Worker:
            return here.worker(devices[number], segment_bytes, arrangement, sizes, chunk_size, visible=visible[number])

        first, second = start(0), start(1)
        segments = len(here.client().list_segments())
        yield Step(segments == 2, f"{segments} segments of {segment_bytes:,} B, lent by {devices[0]} and {devices[1]}")
        for family, (writer, reader) in enumerate([(first, second), (second, first)], start=1):
            yield from _share(writer, reader, family, count, token_bytes)
        yield from _miss_and_partial_hit(second, count, chunk_size)

        digest = first.ask("store", prompt(count, 3), places(sizes, count, 5))
        first.ask("flush")
        first.kill()
        successor = start(0)
        after = len(here.client().list_segments())
        yield Step(after == segments, f"worker on {devices[0]} SIGKILLed; its successor finds {after} segments")
        for name, worker in (("its successor", successor), (f"the one on {devices[1]}", second)):
            yield _check(name, worker.ask("retrieve", prompt(count, 3), places(sizes, count, 6)), count, digest, token_bytes)


def _share(writer: Worker, reader: Worker, family: int, count: int, token_bytes: int) -> Iterator[Step]:
    owner, device = writer.setup.config.pool.device, reader.setup.config.pool.device
    tokens, sizes = prompt(count, family), writer.setup.sizes
    found = reader.ask("lookup", tokens)
    yield Step(found == 0, f"before: {device} looks up {count} tokens and finds {found}")
    digest = writer.ask("store", tokens, places(sizes, count, family))
    visible = writer.ask("flush")
    stored = writer.ask("stats")["tokens"]["stored"]
    yield Step(visible and stored == count, f"{owner} stored {stored} tokens, {stored * token_bytes:,} B, digest {digest[:12]}")
    found = reader.ask("lookup", tokens)
    yield Step(found == count, f"{device} looks up {count} tokens and finds {found}")
    for attempt in ("first", "again"):
        answer = reader.ask("retrieve", tokens, places(sizes, count, 10 + family))
        yield _check(f"{device}, {attempt}", answer, count, digest, token_bytes)
    stats = reader.ask("stats")
    rate, peer = stats["gb_per_s"]["retrieve"], stats["bytes"]["peer"]
    yield Step(peer == 2 * count * token_bytes, f"{device} read {peer:,} B from its peer at {rate:.1f} GB/s")


def _miss_and_partial_hit(worker: Worker, count: int, chunk_size: int) -> Iterator[Step]:
    device, sizes = worker.setup.config.pool.device, worker.setup.sizes
    unknown = worker.ask("retrieve", prompt(count, 77), places(sizes, count, 3))
    yield Step(unknown.tokens == 0 and unknown.clean, f"{device} retrieves {unknown.tokens} tokens of an unknown prompt")
    half = count // 2 // chunk_size * chunk_size
    mixed = torch.cat([prompt(half, 1), prompt(count - half, 78)])
    found = worker.ask("lookup", mixed)
    partial = worker.ask("retrieve", mixed, places(sizes, count, 4))
    right = found == partial.tokens == half and not partial.wrong and partial.clean
    yield Step(right, f"{device} retrieves {partial.tokens} of {count} tokens where the first {half} are known")


def _check(who: str, answer: Retrieved, count: int, digest: str, token_bytes: int) -> Step:
    same = "bytes equal to the writer's" if answer.digest == digest else f"BYTES DIFFER ({answer.digest[:12]})"
    clean = "" if answer.clean else ", OTHER BLOCKS TOUCHED"
    right = answer.tokens == count and not answer.wrong and answer.clean and answer.digest == digest
    rate = answer.tokens * token_bytes / answer.seconds / 1e9
    text = f"{answer.tokens}/{count} tokens in {answer.seconds * 1e3:.2f} ms ({rate:.1f} GB/s), {answer.wrong} wrong bytes, {same}{clean}"
    return Step(right, f"{who}: {text}")


def report(title: str, steps: Iterator[Step]) -> bool:
    """Print the steps as they happen; were all of them right?"""
    print(title)
    right = True
    for step in steps:
        print(f"  {'ok  ' if step.right else 'FAIL'} {step.text}", flush=True)
        right &= step.right
    return right
