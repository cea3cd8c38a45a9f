"""What instances are started with, as users would set it: vLLM's arguments, its connector's,
LMCache's file, environment variables, GPUs.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vcache_backend.children import Program, module, until
from vcache_backend.prove import instance as prove

from ..processes import HOST, ROOT
from .instances import GIB, KINDS, Scale, Spec

BOTH = prove.BOTH
ENVIRONMENT = {
    **prove.ENVIRONMENT,
    "PYTHONUNBUFFERED": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
_STARTED = itertools.count()
COMPILED_BY_RULE = {
    "inductor_compile_config": {"combo_kernels": True, "benchmark_combo_kernel": False}
}
"""vLLM has the compiler time whether kernels are to be combined; then instances that compile
for themselves may differ.
"""


def llm(scale: Scale, model: Path, seqs: int) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` that all of a benchmark's instances have. seqs: requests that an
    instance runs at a time."""
    more = {"dtype": "bfloat16", "block_size": scale.block, "max_num_seqs": seqs}
    more["max_num_batched_tokens"] = scale.batched_tokens
    if not (model / "model.safetensors").exists():
        more["load_format"] = "dummy"
    if scale.cpu:
        more["enforce_eager"] = True
    return prove.arguments(str(model), scale.kv_bytes, scale.max_model_len, scale.cpu, **more)


def arguments(scale: Scale, spec: Spec, model: Path, transfer: dict[str, Any]) -> dict[str, Any]:
    """Of vLLM's `LLM`, for an instance of a fleet. scale: as the instance's kind has it. transfer:
    `kv_transfer_config`; empty: it has none."""
    kind = KINDS[spec.kind]
    given = llm(scale, model, 32) | {"tensor_parallel_size": kind.ranks}
    given["kv_cache_memory_bytes"] //= kind.ranks
    if not scale.cpu:
        given["compilation_config"] = COMPILED_BY_RULE
    if spec.probed:
        given["scheduler_cls"] = f"{__package__}.probe.probed"
    if transfer:
        given["kv_transfer_config"] = transfer
    return given | kind.arguments


def our_connector(socket: Path, lends: int, chunk: int, more: Mapping[str, str]) -> dict[str, Any]:
    """`kv_transfer_config` of ours. more: see `_sections`."""
    sections = _sections(socket, lends, more)
    sections.setdefault("engine", {}).setdefault("chunk_size", chunk)
    sections.setdefault("connector", {}).setdefault("min_hit_tokens", chunk)
    return prove.transfer(sections)


@contextmanager
def lmcache_server(
    log: Path, ports: Sequence[int], chunk: int, nbytes: int, clients: int, mode: str
) -> Iterator[Program]:
    """LMCache's server; vLLM's connectors wait for it. ports: for vLLM, and for HTTP. nbytes: of
    host memory. mode: how KV gets there; `engine_driven`: through shared memory."""
    given: dict[str, Any] = {"host": HOST, "port": ports[0], "http-port": ports[1]}
    given |= {"chunk-size": chunk, "l1-size-gb": nbytes / GIB, "eviction-policy": "LRU"}
    given |= {"max-workers": clients, "supported-transfer-mode": mode}
    if mode == "engine_driven":
        given |= {"shm-name": f"bench{ports[0]}", "worker-reap-timeout-seconds": 0}
    told = [str(part) for key, value in given.items() for part in (f"--{key}", value)]
    told += ["--disable-observability", *(["--no-l1-use-lazy"] if "shm-name" in given else [])]
    command = module("lmcache.cli.main", "server", *told)
    with Program("lmcache", command, log, {**os.environ, **ENVIRONMENT}) as server:
        try:
            yield server
        finally:
            # Killed, it would leave its memory in /dev/shm.
            server.signal(signal.SIGTERM)
            until(lambda: not server.alive, 20.0, 0.1)


def server_mode(port: int, mode: str) -> dict[str, Any]:
    """`kv_transfer_config` of LMCache's server mode. mode: how KV gets to its server."""
    extra = {"host": f"tcp://{HOST}", "port": port, "mp_transfer_mode": mode}
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_extra_config": {f"lmcache.mp.{key}": extra[key] for key in extra},
        **BOTH,
    }


def beside(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of our connector and another one."""
    inside = {"connectors": [ours, theirs]}
    return {**ours, "kv_connector": "VCacheMultiConnector", "kv_connector_extra_config": inside}


def _sections(socket: Path, lends: int, more: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """vcache's configuration. more: of it, `SECTION.KEY` by value."""
    sections: dict[str, dict[str, Any]] = {"server": {"socket": str(socket)}}
    sections["pool"] = {"segment_bytes": lends}
    for path, value in more.items():
        *names, key = path.split(".")
        section: dict[str, Any] = sections
        for name in names:
            section = section.setdefault(name, {})
        section[key] = msgspec.yaml.decode(value)
    return sections


def lmcache_file(scale: Scale, socket: Path, more: Mapping[str, str]) -> dict[str, Any]:
    """configs/lmcache-vcache.yaml with what is different here, for JSON, which is YAML. more: see
    `_sections`."""
    own = _sections(socket, scale.pool_bytes, more)
    return lmcache({"vcache": own}, {"chunk_size": scale.chunk})


def lmcache(extra: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """configs/lmcache-vcache.yaml with changes: of `extra_config`, and of LMCache's own."""
    written = msgspec.yaml.decode(
        (ROOT / "configs/lmcache-vcache.yaml").read_bytes(), type=dict[str, Any]
    )
    return {**written, "extra_config": {**written["extra_config"], **extra}, **theirs}


def environment(cpu: bool, cache: Path, **more: str) -> dict[str, str]:
    """Of an instance or a server. cache: for vLLM's compiled code. more: of its own."""
    given = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(cache),
        # The ports that vLLM's processes take among themselves are looked for from here on, apart
        # from those of other instances of this process, and of other processes.
        "VLLM_PORT": str(34_000 + 800 * (os.getpid() % 32) + 50 * (next(_STARTED) % 16)),
        **(prove.CPU_ENVIRONMENT if cpu else {}),
    }
    return given | more


def visible(gpu: int) -> str:
    """CUDA_VISIBLE_DEVICES for an instance on a GPU of this run, the first being 0: that one, then
    the other of its pair.

    The run's are those in its own CUDA_VISIBLE_DEVICES, so that a host of four may do two runs at a
    time. Past the last one they begin again, the other way round: ranks of an instance then read
    from the other GPU. Of a single one all instances are on it, and what they read of each other
    crosses no link.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    if gpu >= len(own) > 1:
        gpu = (gpu ^ 1) % len(own)
    return ",".join((own[gpu], own[gpu ^ 1])) if len(own) > 1 else own[0]
