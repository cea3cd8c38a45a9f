"""The processes of a run: the metadata server, LMCache's MP server, and vLLM instances, each variant with what users would set.

Both GPUs stay visible to every instance, for peer mappings; the one it computes on is first in CUDA_VISIBLE_DEVICES.
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
from vcache_backend.metadata_server.client import Client

from .process import Child, ChildFailed
from .scale import Scale
from .weights import write_model

PATIENT = ClientConfig(request_seconds=10.0, control_seconds=30.0, connect_seconds=5.0)
START_SECONDS = 240.0
MP_GB = 24
STOCK_GB = 18
"""Room for what `stock` asks again and for the prompts between."""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    # As vLLM sets it for workers in processes of their own; with many threads small host tensors take milliseconds at times.
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. variant: alone, vcache, mp (LMCache's server in host memory), stock (LMCache in the process, host memory)."""

    variant: str
    gpu: int
    eager: bool = False
    tensor_parallel: int = 1


INSTANCES = {
    "alone": Spec(variant="alone", gpu=0),
    "a": Spec(variant="vcache", gpu=0),
    "b": Spec(variant="vcache", gpu=1),
    "mp_a": Spec(variant="mp", gpu=0),
    "mp_b": Spec(variant="mp", gpu=1),
    "stock": Spec(variant="stock", gpu=1),
    "eager_alone": Spec(variant="alone", gpu=0, eager=True),
    "eager_a": Spec(variant="vcache", gpu=0, eager=True),
    "eager_b": Spec(variant="vcache", gpu=1, eager=True),
    "tp2": Spec(variant="vcache", gpu=0, tensor_parallel=2),
}


class Fleet:
    """Starts what is asked for, all at once; everything ends with it.

    folder: logs and settings. cache: vLLM's compiled code, one folder an instance, kept for the next run. in_process: the engine
    core in the instance's own process rather than beside it, as always on the CPU. settings: more of LMCache's `extra_config`.
    """

    def __init__(
        self, scale: Scale, folder: Path, cache: Path, in_process: bool = False, settings: dict[str, str] | None = None
    ) -> None:
        self.scale, self.folder, self._cache, self._in_process = scale, folder, cache, in_process
        self._extra = settings or {}
        # Not among the logs: those may be another run's too, and a journal beside the socket would bring its pool back.
        self._own = tempfile.TemporaryDirectory(prefix="vcache-vllm-")
        self.socket = Path(self._own.name) / "vcache.sock"
        self._children: dict[str, Child] = {}
        self._failed: dict[str, str] = {}
        self._waiting: dict[str, float] = {}
        self._starts = 0
        self._undo = ExitStack()
        self._client: Client | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._model = write_model(folder / "model", scale)

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
            if spec.variant == "vcache" and self._client is None:
                self._serve()
            if spec.variant == "mp" and "mp_server" not in self._children:
                self._serve_mp()
            self._starts += 1
            command = [sys.executable, "-m", f"{__package__}.child", json.dumps(self._settings(name, spec))]
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

    def helper(self) -> Child:
        """The process that can touch the pool's memory, see `memory`."""
        if "memory" not in self._children:
            command = [sys.executable, "-m", f"{__package__}.memory", str(self.socket)]
            self._children["memory"] = self._child("memory", command, {**os.environ, **ENVIRONMENT})
        return self._children["memory"]

    def _serve(self) -> None:
        command = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(self.socket)]
        server = self._child("server", command, {**os.environ, **ENVIRONMENT})
        self._undo.callback(server.kill)
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            if not server.alive or time.monotonic() > deadline:
                raise ChildFailed(f"no metadata server; {server.tail()}")
            time.sleep(0.02)
        self._client = self._undo.enter_context(Client(self.socket, PATIENT))
        self._client.require()

    # ---- LMCache's server

    def _serve_mp(self) -> None:
        """Instances wait for its answer, so nobody waits for it here; it is up long before they ask."""
        self._mp_port = _free_port()
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(self._mp_port)]
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
            "VLLM_PORT": str(40000 + 200 * self._starts),
        }
        if self.scale.cpu:
            given |= CPU_ENVIRONMENT
        else:
            given["CUDA_VISIBLE_DEVICES"] = "0,1" if spec.gpu == 0 else "1,0"
            given["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self._in_process else "1"
        if spec.variant in ("vcache", "stock"):
            file = self.folder / f"{name}.yaml"
            file.write_text(json.dumps(self._lmcache(spec), indent=1))
            given["LMCACHE_CONFIG_FILE"] = str(file)
        return given

    def _lmcache(self, spec: Spec) -> dict[str, Any]:
        """LMCache's YAML (JSON is YAML)."""
        common = {"chunk_size": self.scale.chunk, "pre_caching_hash_algorithm": "sha256"}
        if spec.variant == "stock":
            return {**common, "local_cpu": True, "max_local_cpu_size": STOCK_GB}
        return {
            **common,
            "local_cpu": False,
            "max_local_cpu_size": 0,
            "storage_plugins": ["vcache"],
            "store_location": "vcache",
            "extra_config": {
                "save_only_first_rank": False,
                "storage_plugin.vcache.module_path": "vcache_backend.integration.lmcache",
                "storage_plugin.vcache.class_name": "VCacheBackend",
                "vcache.server.socket": str(self.socket),
                "vcache.pool.segment_bytes": self.scale.pool_bytes,
                **self._extra,
            },
        }

    def _settings(self, name: str, spec: Spec) -> dict[str, Any]:
        """What the child is started with: the arguments of vLLM's `LLM`."""
        scale = self.scale
        arguments: dict[str, Any] = {
            "model": str(self._model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": scale.max_model_len,
            "max_num_seqs": 32,
            "max_num_batched_tokens": scale.batched_tokens,
            "kv_cache_memory_bytes": scale.kv_bytes // spec.tensor_parallel,
            "block_size": scale.block,
            "enable_prefix_caching": True,
            "enforce_eager": spec.eager or scale.cpu,
            "tensor_parallel_size": spec.tensor_parallel,
        }
        if not scale.cpu:
            arguments |= {"load_format": "dummy", "gpu_memory_utilization": 0.15}
        if name in REFERENCES:
            scheduler = "ChunkScheduler" if scale.cpu else "AsyncChunkScheduler"
            arguments["scheduler_cls"] = f"{__package__}.scheduler.{scheduler}"
        if spec.variant != "alone":
            arguments["kv_transfer_config"] = self._transfer(spec)
        return {"arguments": arguments, "dummy": not scale.cpu}

    def _transfer(self, spec: Spec) -> dict[str, Any]:
        both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        if spec.variant != "mp":
            return {"kv_connector": "LMCacheConnectorV1", **both}
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._mp_port, "lmcache.mp.mq_timeout": 30}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": where,
            **both,
        }


REFERENCES = ("alone", "eager_alone", "tp2")
"""Instances whose own prefix cache others are compared with, see `scheduler`."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
