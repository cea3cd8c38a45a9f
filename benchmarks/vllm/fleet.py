"""The processes of a run: the metadata server, LMCache's MP server, and vLLM instances (`instances`, `settings`).

Both GPUs are visible to every instance, the one it computes on first, unless the run is `isolated`: then each sees its own only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ServerStats

from ..mooncake_depot import HOST, Depot
from .instances import INSTANCES, KINDS, Spec
from .process import Child, ChildFailed
from .scale import Scale
from .settings import Door, arguments, lmcache_file
from .weights import write_model

PATIENT = ClientConfig(request_seconds=10.0, control_seconds=30.0, connect_seconds=5.0)
START_SECONDS = 240.0
MP_GB = 24
STORE_POOLS = 2
"""The store holds as much as the pool of two instances."""
WRITTEN_SECONDS = 0.3
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    # As vLLM sets it for workers in processes of their own; with many threads small host tensors take milliseconds at times.
    "OMP_NUM_THREADS": "1",
    # Kernels chosen by rule, not by trial: instances that compile for themselves then compute the same bits.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class Fleet:
    """Starts what is asked for, all at once; everything ends with it.

    folder: logs and settings. cache: vLLM's compiled code, one folder an instance, kept for the next run. in_process: the engine
    core in the instance's own process rather than beside it, as always on the CPU. settings: of vcache, `vcache.SECTION.KEY` by
    value. door: `lmcache`, vcache as a plugin under LMCacheConnectorV1, or `vllm`, our own connector; rows begin with it. isolated:
    an instance sees the GPU it computes on and no other, those with tensor parallelism excepted.
    """

    def __init__(
        self,
        scale: Scale,
        folder: Path,
        cache: Path,
        in_process: bool = False,
        settings: dict[str, str] | None = None,
        door: str = "lmcache",
        isolated: bool = False,
    ) -> None:
        self.scale = msgspec.structs.replace(scale, whole_blocks=door == "vllm")
        self.folder, self._cache, self._in_process = folder, cache, in_process
        self.door, self._isolated = door, isolated
        # Not among the logs: those may be another run's too, and a journal beside the socket would bring its pool back.
        self._own = tempfile.TemporaryDirectory(prefix="vcache-vllm-")
        self.socket = Path(self._own.name) / "vcache.sock"
        self._door = Door(name=door, socket=self.socket, more=settings or {})
        self._children: dict[str, Child] = {}
        self._failed: dict[str, str] = {}
        self._waiting: dict[str, float] = {}
        self._models: dict[str, Path] = {}
        self._starts = 0
        self._undo = ExitStack()
        self._client: Client | None = None
        self._depot: Depot | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self._children):
            self.kill(name)
        self._undo.close()
        self._own.cleanup()

    # ---- instances

    def start(self, names: Iterable[str]) -> None:
        """Let these start beside each other, and what they need first; `instance` waits for one of them."""
        for name in names:
            if name in self._children or name in self._failed:
                continue
            spec = INSTANCES[name]
            if self._door.of(spec) and self._client is None:
                self._serve()
            if spec.below and self._depot is None:
                self._serve_depot()
            if spec.variant == "mp" and "mp_server" not in self._children:
                self._serve_mp()
            self._starts += 1
            command = [sys.executable, "-m", f"{__package__}.child", json.dumps(self._settings(spec))]
            self._children[name] = self._child(name, command, self._environment(name, spec))
            self._waiting[name] = time.monotonic()

    def instance(self, name: str, seconds: float = START_SECONDS) -> Child:
        """The instance, ready. Raises ChildFailed if it did not start, the second time at once."""
        if name in self._failed:
            raise ChildFailed(self._failed[name])
        if name not in self._children:
            self.start([name])
        child = self._children[name]
        server = self._children.get("mp_server") if INSTANCES[name].variant == "mp" else None
        if server is not None and not server.alive:
            raise ChildFailed(f"LMCache's MP server has ended; {server.tail()}")
        started = self._waiting.pop(name, None)
        if started is not None:
            try:
                child.answer(max(1.0, seconds - (time.monotonic() - started)))
                about = child.ask("about")
            except ChildFailed as error:
                self._failed[name] = str(error)
                self.kill(name)
                raise
            print(f"  {name} ready after {time.monotonic() - started:.0f} s: {about}", flush=True)
        return child

    def settle(self) -> None:
        """Wait until nothing starts any more: a start beside a measurement would be measured too. Who fails is told of later."""
        for name in list(self._waiting):
            with suppress(ChildFailed):
                self.instance(name)

    def kill(self, name: str) -> None:
        """SIGKILL. It can be started again."""
        child = self._children.pop(name, None)
        self._waiting.pop(name, None)
        if child is not None:
            child.kill()

    def end(self, names: Iterable[str]) -> None:
        for name in names:
            self.kill(name)

    @property
    def running(self) -> set[str]:
        return set(self._children)

    # ---- the pool

    @property
    def pool(self) -> Client:
        """A client of the metadata server."""
        if self._client is None:
            self._serve()
        assert self._client is not None
        return self._client

    def chunks(self) -> int:
        """Committed chunks in the pool."""
        return self.pool.stats().chunks

    def stored(self, chunks: int, seconds: float = 5.0) -> bool:
        """Wait until the pool holds so many."""
        deadline = time.monotonic() + seconds
        while self.chunks() < chunks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    @property
    def depot(self) -> Depot:
        """The offload tier."""
        if self._depot is None:
            self._serve_depot()
        assert self._depot is not None
        return self._depot

    def below(self, objects: int, seconds: float = 20.0) -> bool:
        """Wait until the store holds so many, and the last of them whole."""
        deadline = time.monotonic() + seconds
        while self.depot.objects() < objects:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        # An object counts from when its writing begins.
        time.sleep(WRITTEN_SECONDS)
        return True

    def helper(self) -> Child:
        """The process that can touch the pool's memory, see `memory`."""
        if "memory" not in self._children:
            command = [sys.executable, "-m", f"{__package__}.memory", str(self.socket)]
            self._children["memory"] = self._child("memory", command, {**os.environ, **ENVIRONMENT})
        return self._children["memory"]

    def _serve(self) -> None:
        self._start_server()
        self._client = self._undo.enter_context(Client(self.socket, PATIENT))
        self._client.require()

    def _start_server(self) -> None:
        command = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(self.socket)]
        self.socket.unlink(missing_ok=True)
        self._server = server = self._child("server", command, {**os.environ, **ENVIRONMENT})
        self._undo.callback(server.kill)
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            if not server.alive or time.monotonic() > deadline:
                raise ChildFailed(f"no metadata server; {server.tail()}")
            time.sleep(0.02)

    @property
    def server_pid(self) -> int:
        """Of the metadata server, which is started if there is none."""
        assert self.pool is not None
        return self._server.pid

    def revive(self, before: ServerStats, seconds: float = 20.0) -> None:
        """Start the metadata server again after its end; wait until all who were connected `before` are, and their segments too."""
        self._server.kill()
        self._start_server()
        deadline = time.monotonic() + seconds
        while True:
            with suppress(VCacheError):
                now = self.pool.stats()
                if now.clients >= before.clients and len(now.segments) >= len(before.segments):
                    return
            if time.monotonic() > deadline:
                raise ChildFailed(f"not all of the server's {before.clients} clients are back; {self._server.tail()}")
            time.sleep(0.05)

    def _serve_depot(self) -> None:
        self._depot = depot = self._undo.enter_context(Depot(self.folder, [STORE_POOLS * self.scale.pool_bytes]))
        store = {"policy": "write_through", "min_bandwidth": 0, "mooncake.master": depot.address, "mooncake.hostname": HOST}
        store = {f"vcache.offload.{name}": value for name, value in store.items()}
        self._door = msgspec.structs.replace(self._door, store=store)

    # ---- LMCache's server

    def _serve_mp(self) -> None:
        """Instances wait for its answer, so nobody waits for it here; it is up long before they ask."""
        self._door = msgspec.structs.replace(self._door, mp_port=_free_port())
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(self._door.mp_port)]
        command += ["--l1-size-gb", str(MP_GB), "--eviction-policy", "LRU", "--chunk-size", str(self.scale.chunk)]
        command += ["--supported-transfer-mode", "auto", "--disable-observability"] if self.scale.cpu else []
        self._children["mp_server"] = self._child("mp_server", command, {**os.environ, **ENVIRONMENT})

    # ---- settings

    def _child(self, name: str, command: list[str], environment: dict[str, str]) -> Child:
        return Child(name, command, environment, self.folder / f"{name}.log")

    def _environment(self, name: str, spec: Spec) -> dict[str, str]:
        given = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(self._cache / name),
            "VLLM_PORT": str(port() + 200 * self._starts),
        }
        if self.scale.cpu:
            given |= CPU_ENVIRONMENT
        else:
            both = visible(spec.gpu)
            alone = self._isolated and spec.tensor_parallel == 1
            given["CUDA_VISIBLE_DEVICES"] = both.split(",")[0] if alone else both
            given["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self._in_process else "1"
        if spec.variant == "stock" or self._door.of(spec) == "lmcache":
            file = self.folder / f"{name}.yaml"
            file.write_text(json.dumps(lmcache_file(self.scale, spec, self._door), indent=1))
            given["LMCACHE_CONFIG_FILE"] = str(file)
        return given if self.scale.cpu else given | KINDS[spec.kind].environment

    def _settings(self, spec: Spec) -> dict[str, Any]:
        """What the child is started with."""
        scale = KINDS[spec.kind].of(self.scale)
        if spec.kind not in self._models:
            self._models[spec.kind] = write_model(self.folder / f"model{spec.kind and '_' + spec.kind}", scale)
        given = arguments(scale, spec, self._models[spec.kind], self._door)
        return {"arguments": given, "dummy": given.get("load_format") == "dummy"}


def visible(gpu: int) -> str:
    """CUDA_VISIBLE_DEVICES for an instance on the first or second GPU of this run: both, its own first.

    The run's are the two in its own CUDA_VISIBLE_DEVICES, so that a host of four may do two runs at a time.
    """
    pair = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return ",".join((pair[gpu], pair[1 - gpu]))


def port() -> int:
    """Where this run's ports begin."""
    return 40000 + 3000 * int(visible(0).split(",")[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
