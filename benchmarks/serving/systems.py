"""The systems compared: what each is started with, as its users would, at the same VRAM a GPU; on
two GPUs, and tiny on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ..processes import HOST
from ..vllm.instances import SCALES, Scale, sized
from ..vllm.settings import BOTH, beside, llm, our_connector, server_mode
from .workloads import Plan

MODEL = "model"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """scale: the model, and what an instance may take on. kv_bytes: vLLM's KV cache of an instance
    beside a pool; pool_bytes: what it lends to the pool. Without a pool an instance has the sum of
    both. host_bytes: what a system keeps in host memory. seqs: requests that an instance runs at a
    time. instances: servers, or data parallel ranks of one. prefills: how many of the servers of a
    system with `apart` compute prompts."""

    scale: Scale
    kv_bytes: int
    pool_bytes: int
    host_bytes: int
    seqs: int
    plan: Plan
    instances: int = 2
    prefills: int = 1

    def kv_bytes_of(self, system: System) -> int:
        """vLLM's KV cache of an instance."""
        return self.kv_bytes + (0 if system.share == "pool" else self.pool_bytes)


def _sizes(name: str, given: dict[str, Any]) -> Sizes:
    scale = SCALES[name]
    plan = given["plan"] | {"vocabulary": scale.vocabulary, "block": scale.block}
    return sized(given, Sizes, scale=scale, plan=plan)


_GIVEN = msgspec.json.decode(Path(__file__).with_name("sizes.json").read_bytes())
SIZES = {name: _sizes(name, given) for name, given in _GIVEN.items()}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """label: for people. share: vcache's `connector.share`; empty: without it. lmcache: how KV gets
    to LMCache's server; empty: without it. behind: another connector of vLLM's behind ours, which
    keeps KV in host memory. host: our pool in host memory, for what KV caches lose. ranks: one
    server with data parallel ranks, among which vLLM balances itself. apart: the first servers
    compute prompts, the others answer; `announced`, `after`, `nixl` or `mooncake`, by how the KV is
    handed over. connector: another one than vcache. block, layout: of the KV cache, if
    not the usual ones."""

    label: str
    share: str = ""
    lmcache: str = ""
    behind: str = ""
    host: bool = False
    ranks: bool = False
    apart: str = ""
    connector: str = ""
    block: int = 0
    layout: str = ""


def _nixl(block: int, way: str) -> System:
    label = f"NIXL, {way.lower()}, blocks of {block}"
    return System(label=label, apart="nixl", connector=f"Nixl{way}Connector", block=block)


_APART = System(
    label="vcache, blocks of 64, NIXL's layout",
    share="in_place",
    apart="announced",
    block=64,
    layout="HND",
)
SYSTEMS = {
    "alone": System(label="vLLM alone"),
    "pool": System(label="vcache, a pool", share="pool"),
    "inplace": System(label="vcache in place", share="in_place"),
    "lmcache": System(label="LMCache's server", lmcache="auto"),
    "both": System(
        label="vcache in place beside LMCache's server", share="in_place", lmcache="engine_driven"
    ),
    "both_pool": System(
        label="vcache, a pool, beside LMCache's server", share="pool", lmcache="auto"
    ),
    # Who keeps in host memory what KV caches in place lose: our pool, or a connector of vLLM's.
    "inplace_host": System(label="vcache in place, a host pool", share="in_place", host=True),
    "both_offloading": System(
        label="vcache in place beside OffloadingConnector",
        share="in_place",
        behind="OffloadingConnector",
    ),
    "both_simple": System(
        label="vcache in place beside SimpleCPUOffloadConnector",
        share="in_place",
        behind="SimpleCPUOffloadConnector",
    ),
    "alone_dp": System(label="vLLM alone, data parallel", ranks=True),
    "inplace_dp": System(label="vcache in place, data parallel", share="in_place", ranks=True),
    "pool_dp": System(label="vcache, a pool, data parallel", share="pool", ranks=True),
    # Prefill and decode apart; beside `alone` and `inplace`, whose servers do both. With blocks and
    # layout of NIXL's best arm, since they decide how long a step that decodes takes.
    "pd_vcache": _APART,
    # The decode server is asked once the prefill server has answered, as with NIXL.
    "pd_vcache_after": replace(_APART, label=f"{_APART.label}, asked after", apart="after"),
    "pd_vcache_16": System(label="vcache, blocks of 16", share="in_place", apart="announced"),
    **{
        f"pd_nixl_{way.lower()}_{block}": _nixl(block, way)
        for way in ("Pull", "Push")
        for block in (16, 64)
    },
    # Its wheels move KV between the GPUs of a host with copies between mapped memory.
    "pd_mooncake": System(
        label="Mooncake, NVLink, blocks of 64",
        apart="mooncake",
        connector="MooncakeConnector",
        block=64,
    ),
}


def mooncake_peer(port: int) -> dict[str, str]:
    """What a decode server has to know of the prefill server at a port, besides the request's name:
    its engine, and the place where it tells its workers' addresses."""
    # Below all ports of `free_ports`.
    where = f"http://{HOST}:{port - 12_000}"
    return {"remote_engine_id": f"mooncake-{port}", "remote_bootstrap_addr": where}


def serve_arguments(
    name: str, sizes: Sizes, model: Path, port: int, side: Mapping[str, Any]
) -> list[str]:
    """Of vLLM's OpenAI server. side: see `transfer`."""
    system = SYSTEMS[name]
    given = llm(sizes.scale, model, sizes.seqs) | {"served_model_name": MODEL, "host": HOST}
    given |= {"port": port, "kv_cache_memory_bytes": sizes.kv_bytes_of(system)}
    given |= {"enable_prompt_tokens_details": True, "disable_uvicorn_access_log": True}
    if system.ranks:
        given["data_parallel_size"] = sizes.instances
    if system.block:
        given["block_size"] = system.block
    if (config := transfer(name, sizes, {**side, "port": port})) is not None:
        given["kv_transfer_config"] = config
    arguments: list[str] = []
    for key, value in given.items():
        flag = f"--{key.replace('_', '-')}"
        said = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [flag] if value is True else [flag, said]
    return arguments


def transfer(name: str, sizes: Sizes, side: Mapping[str, Any]) -> dict[str, Any] | None:
    """The connector, if it has one. side: `socket` of the metadata server, `lmcache`, the port of
    LMCache's server, `index` and `port` of the server, and `more`, settings of vcache by
    `SECTION.KEY`."""
    system, role = SYSTEMS[name], BOTH
    if system.apart:
        first = side["index"] < sizes.prefills
        role = {"kv_role": "kv_producer" if first else "kv_consumer"}
    if system.apart == "mooncake":
        own = {"engine_id": mooncake_peer(side["port"])["remote_engine_id"]}
        extra = {"kv_connector_extra_config": {"mooncake_protocol": "nvlink_intra"}}
        return {"kv_connector": system.connector, **own, **extra, **role}
    if system.connector:
        return {"kv_connector": system.connector, **role}
    theirs = server_mode(side["lmcache"], system.lmcache) if system.lmcache else None
    if not (share := system.share):
        return theirs
    more = {"connector.share": share}
    lends = sizes.pool_bytes if share == "pool" else 0
    if system.host:
        more["pool.device"], lends = "host", sizes.host_bytes  # all servers together
    elif share == "pool" and sizes.scale.cpu:
        more["pool.device"] = f"host:{side['index']}"
    more |= dict(side.get("more", {}))
    ours = our_connector(side["socket"], lends, sizes.scale.chunk, more) | role
    if system.behind:
        # As much on the whole node as LMCache's server has.
        keeps = {"cpu_bytes_to_use": sizes.host_bytes // sizes.instances}
        theirs = {"kv_connector": system.behind, "kv_connector_extra_config": keeps, **BOTH}
    return beside(ours, theirs) if theirs else ours
