"""The processes of a run: the metadata server, and vLLM instances (`instances`, `settings`).

Through our connector an instance sees only the GPUs it computes on, through LMCache first those.

Instances of one kind run the same compiled code, which they load from one cache of vLLM's. The
first instance with a connector and the first without compile it, are ended once it is saved, and
start again like all others: an instance that runs code which it has compiled itself may differ in
the last bit from one that has loaded it."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vcache_backend.children import Child, ChildFailed, module, until
from vcache_backend.protocol.client import Client
from vcache_backend.prove.comparison import Prompts, soil

from ..processes import PATIENT, free_ports, metadata_server
from ..results import Clock, Row, none
from .instances import GIB, INSTANCES, KINDS, Scale, Spec, joined
from .settings import (
    BOTH,
    ENVIRONMENT,
    arguments,
    beside,
    environment,
    lmcache_file,
    lmcache_server,
    our_connector,
    server_mode,
    visible,
)

START_SECONDS = 240.0
OWNERS = 2
"""In place: how many times as large as a reader's KV cache an owner's is."""
ANSWER_SECONDS = 120.0
SAVED = (b"saved AOT compiled function", b"Directly load AOT compilation")
"""What each worker of vLLM logs once there is compiled code of its rank that others can load."""


class Fleet:
    """Starts the processes that are asked for; the context manager ends all of them.

    folder: for logs and settings. cache: for vLLM's compiled code and the models, kept for the next
    run. more: settings of vcache, by `SECTION.KEY`. way: `lmcache`, vcache as a plugin under
    LMCacheConnectorV1; `vllm`, our own connector; `inplace`, the same, but nobody lends to the
    pool, and others read vLLM's own KV cache; `saved`, in place with a pool in host memory, out of
    which hits come; `both`, in place beside LMCache's server; or `behind`, beside it, but hits come
    from LMCache. Rows begin with it."""

    def __init__(
        self, scale: Scale, folder: Path, cache: Path, more: dict[str, str], way: str
    ) -> None:
        self.rows, self.lmcache, self.in_place = way, way == "lmcache", way in ("inplace", "both")
        self.scale, self._behind, self._ports = scale, way == "behind", list[int]()
        self._saved = way == "saved"
        if self.in_place or self._behind:
            self.scale = msgspec.structs.replace(scale, pool_bytes=0)
        if self.in_place or self._behind or self._saved:
            # Hits of a block count, too.
            more = {"connector.share": "in_place", "connector.min_hit_tokens": "1", **more}
        if self._saved:
            more = {"pool.device": "host", **more}
        self.folder, self.cache, self.more = folder, cache, more
        self._soil = Prompts(scale.vocabulary, scale.chunk, scale.block, seed=-1)
        self._children: dict[str, Child] = {}
        self._failed: dict[str, str] = {}
        self._waiting: dict[str, float] = {}
        self._compiled: set[tuple[str, bool]] = set()
        for each in (folder, cache):
            each.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            server = metadata_server(folder / "server.log", **ENVIRONMENT)
            self._socket = undo.enter_context(server)
            if way in ("both", "behind"):
                self._ports = free_ports(2)
                size = GIB // 16 if scale.cpu else 24 * GIB
                told = folder / "lmcache.log", self._ports, scale.chunk, size, 2, "engine_driven"
                undo.enter_context(lmcache_server(*told))
            self.pool = undo.enter_context(Client(self._socket, PATIENT))
            self.pool.require()
            self._undo = undo.pop_all()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(list(self._children))
        self._undo.close()

    # ---- instances

    def start(self, names: Iterable[str]) -> None:
        """Start these instances, and first what they need. Returns once the code that they share is
        compiled; `instance` waits for one.
        """
        new = [name for name in names if name not in self._children and name not in self._failed]
        kinds = {name: (INSTANCES[name].kind, INSTANCES[name].alone) for name in new}
        first = {
            kinds[name]: name
            for name in reversed(new)
            if not self.scale.cpu
            and kinds[name] not in self._compiled
            and "enforce_eager" not in KINDS[kinds[name][0]].arguments
        }
        with (self.cache / "lock").open("w") as lock:
            # Two runs beside each other would each make their own models and code.
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in new:
                self.model(INSTANCES[name].kind)
            for name in first.values():
                self._start(name)
            for name in first.values():
                self._await_compiled(name)
            self.end(first.values())
        self._compiled |= set(first)
        for name in new:
            self._start(name)

    def _start(self, name: str) -> None:
        spec = INSTANCES[name]
        scale = KINDS[spec.kind].of(self.scale)
        if self.in_place and spec.gpu == 0:
            # The owner must still hold what its readers' own prefix caches cannot keep.
            scale = msgspec.structs.replace(scale, kv_bytes=OWNERS * scale.kv_bytes)
        given = arguments(scale, spec, self.model(spec.kind), self._transfer(spec, scale))
        log = self.folder / f"{name}.log"
        # Remove an earlier run's log: its lines would say that the code is compiled.
        log.unlink(missing_ok=True)
        command = module(f"{__package__}.child", json.dumps(given))
        self._children[name] = Child(name, command, log, self._environment(name, spec))
        self._waiting[name] = time.monotonic()

    def _transfer(self, spec: Spec, scale: Scale) -> dict[str, Any]:
        """An instance's `kv_transfer_config`; empty: it has none."""
        if spec.alone:
            return {}
        if self.lmcache:
            return {"kv_connector": "LMCacheConnectorV1", **BOTH}
        ours = our_connector(self._socket, scale.pool_bytes, scale.chunk, self.more)
        ours["kv_role"] = "kv_producer" if self._behind else spec.role
        if self._ports:
            return beside(ours, server_mode(self._ports[0], "engine_driven")) | BOTH
        return ours

    def of(self, kind: str) -> Scale:
        """The run's scale, adapted to instances of a kind."""
        return KINDS[kind].of(self.scale)

    def prompts(self, kind: str, seed: int) -> Prompts:
        """For instances of a kind. LMCache's hits end with chunks, in place or not."""
        return self.of(kind).prompts(self.rows == "inplace", seed, KINDS[kind].tail)

    def model(self, kind: str) -> Path:
        scale = self.of(kind)
        return scale.write_model(self.cache / joined("model", kind, scale.name))

    def _await_compiled(self, name: str) -> None:
        """Wait until others can load what each worker of this instance compiles, or until it has
        started or failed. `instance` reports a failure.
        """
        child, workers = self._children[name], KINDS[INSTANCES[name].kind].ranks

        def compiled() -> bool:
            log = child.log.read_bytes()
            return child.has_answered or sum(map(log.count, SAVED)) >= workers

        until(compiled, START_SECONDS, 0.2)
        took = time.monotonic() - self._waiting[name]
        print(f"  {name}: compiled after {took:.0f} s", flush=True)

    def instance(self, name: str) -> Child:
        """The instance, once it is ready. ChildFailed if it does not start; a second call for it
        raises at once.
        """
        if name in self._failed:
            raise ChildFailed(self._failed[name])
        self.start([name])
        child = self._children[name]
        started = self._waiting.pop(name, None)
        if started is not None:
            try:
                child.answer(max(1.0, START_SECONDS - (time.monotonic() - started)))
            except ChildFailed as error:
                self._failed[name] = str(error)
                self.end([name])
                raise
            print(f"  {name} ready after {time.monotonic() - started:.0f} s", flush=True)
        return child

    def settle(self) -> None:
        """Wait until no instance is starting, so that a start does not disturb a measurement.
        `instance` reports failures.
        """
        for name in list(self._waiting):
            with suppress(ChildFailed):
                self.instance(name)

    def end(self, names: Iterable[str]) -> None:
        """SIGKILL. They can be started again."""
        for name in names:
            self._waiting.pop(name, None)
            if (child := self._children.pop(name, None)) is not None:
                child.kill()

    @property
    def running(self) -> set[str]:
        return set(self._children)

    # ---- the pool

    def compute(self, writer: str, prompt: list[int]) -> None:
        """Have an instance compute a prompt, and wait until others can find it. Says so if they
        cannot.
        """
        due = self.pool.stats().chunks + len(prompt) // self.scale.chunk
        self.instance(writer).ask("generate", ANSWER_SECONDS, tokens=prompt, count=1)
        if self._behind:
            # Nobody tells when LMCache has stored it.
            return time.sleep(0.5)
        if self.lmcache:
            found = until(lambda: self.pool.stats().chunks >= due, 5.0, 0.005)
        else:
            found = self.instance(writer).ask("told", ANSWER_SECONDS)
        if self._saved:
            # Of a prompt that begins like an earlier one the pool has some chunks already.
            self._overwrite(writer)
        if not found:
            print(f"  {writer}: not all of a prompt can be found", flush=True)

    def _overwrite(self, name: str) -> None:
        """Overwrite an instance's whole KV cache, so that only the pool has what was there."""
        child, scale = self.instance(name), self.scale
        tokens, length = scale.kv_bytes // scale.token_bytes, min(scale.lengths.values())
        soil(child, self._soil, tokens, length)
        child.ask("told", ANSWER_SECONDS)

    def make_room(self, tokens: int) -> None:
        """Empty the pool if so many tokens would make it evict: later chunks would lie on the
        reader's own GPU.
        """
        scale = self.scale
        needed = (self.pool.stats().chunks * scale.chunk + tokens) * scale.token_bytes
        if not self.in_place and needed > 0.8 * scale.pool_bytes:
            self.pool.clear()

    def strayed(self) -> list[Row]:
        """Rows for what must not happen: in place, that something lies in a pool; of `saved`, that
        a byte came out of another instance's KV cache.
        """
        if self._saved:
            # Instances report from time to time.
            until(lambda: any(read.nbytes for read in self.pool.stats().reads), 5.0)
            reads = self.pool.stats().reads
            pooled = sum(read.nbytes for read in reads if read.instance == "pool")
            count = sum(read.nbytes for read in reads) - pooled
            what = f"read out of other instances' KV caches; out of the pool: {pooled:,} bytes"
            return [none(f"{self.rows}_read_in_place", "bytes", count, what)]
        if not self.in_place:
            return []
        stats = self.pool.stats()
        held = [f"{each.resident} in {each.id[:8]} on {each.device}" for each in stats.instances]
        what = "segments of the pool, and chunks copied into it: stores move no byte"
        what += f"; resident chunks: {', '.join(held) or 'none'}"
        count = stats.chunks + len(stats.segments)
        return [none(f"{self.rows}_pooled_chunks", "chunks", count, what)]

    def _environment(self, name: str, spec: Spec) -> dict[str, str]:
        kind, given = KINDS[spec.kind], environment(self.scale.cpu, self.cache)
        if self.lmcache and not spec.alone:
            file = self.folder / f"{name}.yaml"
            settings = lmcache_file(self.scale, self._socket, self.more)
            file.write_text(json.dumps(settings, indent=1))
            given["LMCACHE_CONFIG_FILE"] = str(file)
        if self.scale.cpu:
            return given | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(kind.ranks > 1))}
        gpus = visible(spec.gpu)
        if not self.lmcache and kind.ranks == 1:
            gpus = gpus.split(",")[0]
        return given | {"CUDA_VISIBLE_DEVICES": gpus}


class Run(NamedTuple):
    """What a part of `vllm_ttft` works with. rounds: prompts of each length that are timed. kind:
    of the instances."""

    fleet: Fleet
    clock: Clock
    prompts: Prompts
    rounds: int
    kind: str = ""

    @property
    def scale(self) -> Scale:
        return self.fleet.of(self.kind)

    def instance(self, who: str) -> Child:
        """ChildFailed."""
        return self.fleet.instance(joined(self.kind, who))

    def compute(self, prompt: list[int]) -> None:
        """By A. Empties the pool first if it would have to evict. ChildFailed."""
        self.fleet.make_room(len(prompt))
        self.fleet.compute(joined(self.kind, "a"), prompt)

    def case(self, what: str) -> str:
        """A row's name."""
        return joined(self.fleet.rows, what, self.kind)
