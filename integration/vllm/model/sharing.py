"""Decides how an instance of vLLM shares its KV: in place, through a pool, or not at all."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import vllm

from vcache_backend import config as configuration
from vcache_backend import proofs
from vcache_backend.config import ByteSize, Config, ConnectorConfig
from vcache_backend.errors import LayoutError
from vcache_backend.proofs import Combination
from vcache_backend.supported import VLLM, numbers
from vcache_backend.vram_pool.generations import MACHINE

from . import compat, groups
from . import spec as model_spec
from .spec import ModelSpec

log = logging.getLogger("vllm.vcache")
POOL = "connector.share: pool"
"""The setting for models, and for memory, that cannot be shared in place."""
_BESIDE = (
    "a pool beside a KV cache shared in place takes models with one block table: leave out "
    "pool.segment_bytes, pool.device and offload.policy"
)


class Facts(NamedTuple):
    """What vLLM's configuration says about sharing. A reason is one line with the change to
    make."""

    model: ModelSpec
    refused: str = ""
    """Why nothing may be cached."""
    hindered: str = ""
    """Why the KV cache cannot be shared in place; a pool may do."""
    unshared: str = ""
    """Why neither in place nor a pool can serve the model's block tables."""
    unpooled: str = ""
    """Why a pool cannot serve the model's block tables."""
    several: bool = False
    """See `groups.several`."""
    fitting: int = 0
    """The chunk size nearest above the one set that all block tables allow."""


class Plan(NamedTuple):
    """How an instance shares."""

    model: ModelSpec
    settings: Config
    """With `connector.share` decided. In place without a pool unless one is set, and with a chunk
    size that fits."""
    refused: str
    """Why the instance caches nothing, and what to change; empty if it caches."""
    standing: str = ""
    """What is known of this vLLM: see `proofs.standing`."""


def plan(vllm_config: Any, kv_cache_config: Any, settings: Config) -> Plan:
    """Decide for this instance. All processes of the instance get the same answer."""
    facts = read_facts(vllm_config, kv_cache_config, settings)
    made = _proved(sharing(settings, facts))
    if made.settings.connector.share != settings.connector.share and facts.hindered:
        log.info("vcache: KV goes through a pool (connector.share: auto): %s", facts.hindered)
    return made


def _proved(made: Plan) -> Plan:
    """The plan, refused with a vLLM that vcache was not tested with, unless it was proved here."""
    version, connector = vllm.__version__, made.settings.connector
    wanted = None if VLLM.supports(version) else Combination.here(connector.share)
    proof = proofs.find(wanted) if wanted is not None else None
    refused, how = made.refused, " --share pool" if connector.share == "pool" else ""
    if wanted is not None and proof is None and not connector.unproved:
        why = f"vcache was not tested with vLLM {version}, and nobody has proved it here"
        if fault := proofs.unbelieved():
            why += f" (no proof there is believed: {fault})"
        refused = refused or f"{why}: run `vcache prove{how}` (or set connector.unproved: true)"
    return made._replace(refused=refused, standing=proofs.standing(version, proof))


def sharing(settings: Config, facts: Facts) -> Plan:
    """Decide by the user's settings and vLLM's. Pure."""
    share, pool, engine = settings.connector.share, settings.pool, settings.engine
    refused, replace = facts.refused, msgspec.structs.replace
    lends = pool.segment_bytes or pool.device != "auto" or settings.offload.policy != "off"
    if share == "auto":
        share = "pool" if lends or facts.hindered else "in_place"
    if share == "in_place":
        if pool.segment_bytes is None:
            pool = replace(pool, segment_bytes=ByteSize(0))
        hindered = facts.hindered or (_BESIDE if facts.several and lends else "")
        refused = refused or facts.unshared or (f"{hindered}; or set {POOL}" if hindered else "")
        # In place a chunk is only a unit of waiting, so its size need not be the user's.
        engine = replace(engine, chunk_size=facts.fitting or engine.chunk_size)
    else:
        refused = refused or facts.unpooled
    connector, model = replace(settings.connector, share=share), facts.model
    if facts.several:
        # Other chunks and hits: instances of both kinds have nothing to share.
        model = replace(model, extra=model.extra | {"share": share})
    decided = replace(settings, connector=connector, pool=pool, engine=engine)
    return Plan(model, decided, refused)


def read_facts(vllm_config: Any, kv_cache_config: Any, settings: Config) -> Facts:
    """Read the facts from vLLM's configuration."""
    model = read_model(vllm_config, kv_cache_config, settings.connector)
    refused = next(_refusals(vllm_config, model), "")
    size, most = settings.engine.chunk_size, vllm_config.model_config.max_model_len
    fitting = groups.fitting(kv_cache_config, size)
    unpooled = _misfit(kv_cache_config, size, in_place=False)
    if size > most and not unpooled:
        few = f"no request has more than {most} tokens (max_model_len)"
        unpooled = f"engine.chunk_size is {size}, and {few}: set it to a fraction of that"
    return Facts(
        model,
        refused,
        hindered=next(_hindrances(vllm_config), ""),
        unshared=_misfit(kv_cache_config, fitting, in_place=True),
        unpooled=unpooled,
        several=groups.several(kv_cache_config),
        fitting=fitting,
    )


def _misfit(kv_cache_config: Any, chunk_size: int, in_place: bool) -> str:
    """Why the model's block tables cannot be shared; empty if they can."""
    try:
        groups.read(kv_cache_config, chunk_size, in_place)
    except LayoutError as error:
        return str(error)
    return ""


def read_model(vllm_config: Any, kv_cache_config: Any, connector: ConnectorConfig) -> ModelSpec:
    """`model_spec.read_model`, adapted to models with several groups, and to weights with versions
    (docs/adr/0024)."""
    model = model_spec.read_model(vllm_config, connector.model)
    if connector.weights:
        extra = model.extra | {"versions": "named"}
        model = msgspec.structs.replace(model, named=True, extra=extra)
    try:
        tables = groups.read(kv_cache_config, 0, in_place=True)
    except LayoutError:
        return model
    # MLA's ranks hold equal latents, but different states, and different heads of another draft.
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    mla = model.use_mla and not tables.states and (draft is None or draft.use_mla)
    return msgspec.structs.replace(model, use_mla=mla, extra=model.extra | {"groups": tables.text})


def _hindrances(vllm_config: Any) -> Iterator[str]:
    """List why this instance's KV cache cannot be shared in place. Each reason names a setting
    besides `connector.share` to change, if one helps."""
    given, machine = vllm_config.model_config, platform.machine()
    if machine != MACHINE:
        yield f"it relies on the order of writes of x86-64, and this machine is {machine}"
    if not vllm_config.cache_config.enable_prefix_caching:
        yield "vLLM's KV cache keeps nothing to share: leave out --no-enable-prefix-caching"
    if given.enable_sleep_mode or given.enable_cumem_allocator:
        # Our allocator would replace sleep mode's for the KV cache.
        yield "sleep mode cannot free a KV cache that others map: leave out --enable-sleep-mode"
    if vllm_config.device_config.device_type == "cuda" and configuration.expandable_segments():
        why = "expandable_segments and our allocator exclude each other (pytorch issue 147851)"
        yield f"{why}: take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"


def _refusals(vllm_config: Any, model: ModelSpec) -> Iterator[str]:
    """List why this instance must not cache, each reason with the change to make."""
    given = vllm_config.model_config
    if numbers(vllm.__version__) < VLLM.low:
        yield f"vLLM {vllm.__version__} is not supported: install {VLLM.name}{VLLM.wanted}"
    yield from model_spec.misfits(vllm_config, model)
    if vllm_config.weight_transfer_config is not None and not model.named:
        why = "--weight-transfer-config brings new weights, and KV of old ones must not be found"
        how = "set connector.weights to the version with which the instance starts"
        yield f"{why}: {how} (see New weights in docs/vllm/operation.md)"
    if not model.hash_algorithm.startswith("sha256"):
        why = f"prefixes whose hashes are {model.hash_algorithm} can be made to collide"
        yield f"{why}: set --prefix-caching-hash-algo sha256"
    if reason := model_spec.seed(compat.hash_seed(vllm_config)):
        yield reason
    if given.enable_sleep_mode and not compat.tells_of_sleep():
        why = "vLLM before 0.33 sleeps while copies may still run"
        yield f"{why}: start vLLM without --enable-sleep-mode, or use vLLM 0.33"
    if given.enable_sleep_mode and given.sleep_mode_backend != "cumem":
        why = f"sleep mode's backend {given.sleep_mode_backend} is not known"
        yield f"{why}: set --sleep-mode-backend cumem"
    if not given.is_prefix_caching_supported:
        why = "vLLM has no prefix cache for this model: no setting changes that"
        if given.pooler_config:
            why = "the model's pooling needs every token of a prompt computed: set a pooling type "
            why += "of the last token in --pooler-config, if possible"
        yield why
    if vllm_config.aux_output_config.enabled and not compat.caps_hits_of_experts():
        why = "vLLM before 0.33 ends on a hit if it has to return the routed experts"
        yield f"{why}: start it without --enable-return-routed-experts, or use vLLM 0.33"
