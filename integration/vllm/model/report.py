"""`vcache doctor --model`: whether our connector caches a model, and how many tokens a pool holds.

The doctor runs it with a model's name, and a configuration as JSON on stdin; its findings come as
JSON on stdout. vLLM makes its configuration, the model without weights, the KV cache specs and
block tables. Our connector decides as at the start of an instance.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import vllm
from pydantic import ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.engine import core as engine_core
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.worker_base import WorkerBase

from vcache_backend import config
from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor import Finding, fail, ok
from vcache_backend.errors import MAX_LINE_CHARS, LayoutError, printable

from . import groups
from .sharing import plan

_TRANSFER = KVTransferConfig(
    kv_connector="VCacheConnector",
    kv_connector_module_path="vcache_backend.integration.vllm_connector",
    kv_role="kv_both",
)


_KINDS = {
    "full": "of full attention",
    "window": "with a window of {:,} tokens",
    "state": "with a state",
    "local": "of chunked local attention",
    "again": "whose blocks no hit needs",
}
"""By `groups.kind`, or `groups.computed_again`."""


class ModelReport(NamedTuple):
    """What an instance of a model would cache, with one worker."""

    architecture: str
    layers: Mapping[tuple[str, int, int], int]
    """By kind, tokens of the window, and tokens of a block: the number of layers."""
    hits: int
    """Tokens at whose multiples hits end, in vLLM's own prefix cache and in place."""
    refused: str
    """Why nothing is cached, and what to change; empty if it is."""
    settings: Config
    """With what our connector has decided."""
    dtype: str = ""
    """Of the KV cache."""
    chunk_bytes: int = 0
    """Of a chunk in a pool; 0 if refused, or if no pool can hold chunks."""
    state_bytes: int = 0

    def __str__(self) -> str:
        layers = ", ".join(
            f"{count} layers {_KINDS.get(kind, kind).format(window)}"
            for (kind, window, _), count in self.layers.items()
        )
        return f"{printable(self.architecture)}: {layers or 'no KV cache'}"


def report(name: str, settings: Config) -> ModelReport:
    """Describe what an instance of model `name` would cache under these settings.

    Loads no weights, downloads nothing and runs no code from the model's repository. Raises vLLM's
    error for a model that vLLM cannot serve."""
    arguments = EngineArgs(
        model=name,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        # Enough for any model's longest request, without an effect on a chunk.
        num_gpu_blocks_override=1 << 20,
        kv_transfer_config=_TRANSFER,
    )
    vllm_config = arguments.create_engine_config()
    specs = _specs(vllm_config)
    architecture = ", ".join(vllm_config.model_config.architectures)
    if not specs:
        nothing = "the model keeps nothing of its tokens: no setting changes that"
        return ModelReport(architecture, {}, 0, nothing, settings)
    kv_cache = _kv_cache(vllm_config, specs)
    model, settings, refused, _ = plan(vllm_config, kv_cache, settings)
    sizes = (0, 0) if refused else _sizes(kv_cache, settings.engine.chunk_size)
    hits, layers = groups.fitting(kv_cache, 1), _layers(kv_cache)
    return ModelReport(architecture, layers, hits, refused, settings, model.kv_cache_dtype, *sizes)


def findings(name: str, model: ModelReport, lent: ByteSize) -> Iterator[Finding]:
    """Say whether the model is cached, the size of its chunks, and how many tokens a pool holds to
    which each worker lends so many bytes, also if instances need none."""
    what = f"{printable(name)}, vLLM {vllm.__version__}, {model}"
    if model.refused:
        yield fail("model", f"{what}: nothing of it is cached: {model.refused}")
        return
    in_place = model.settings.connector.share == "in_place"
    ends = f"in place, hits end at multiples of {model.hits} tokens"
    way = ends if in_place else "through a pool"
    yield ok("model", f"{what}: shared {way}")
    if not model.chunk_bytes:
        return
    size = model.settings.engine.chunk_size
    whole, state = ByteSize(model.chunk_bytes), ByteSize(model.state_bytes)
    said = f"{whole // size:,} B a token in {model.dtype}, {whole.about} a chunk of {size} tokens"
    said += ", all ranks together"
    yield ok("chunks", f"{said}; a state beside it takes {state.about}" if state else said)
    said = f"1 GiB of pool holds {(1 << 30) // whole * size:,} tokens; pool.segment_bytes: {lent}"
    yield ok("pool", f"{said} holds {lent // whole * size:,} a worker and rank")


def _specs(vllm_config: Any) -> Mapping[str, Any]:
    """Make vLLM's KV cache spec of each layer. The model takes no memory."""
    with set_current_vllm_config(vllm_config), _alone():
        with _Unallocated(), set_default_torch_dtype(vllm_config.model_config.dtype):
            initialize_model(vllm_config)
        # As an executor does once its worker has the model.
        current_platform.update_block_size_for_backend(vllm_config)
        specs: Mapping[str, Any] = get_kv_cache_spec(vllm_config)
        if specs:
            worker = SimpleNamespace(vllm_config=vllm_config)
            layouts = WorkerBase.get_supported_kv_cache_layouts(worker)
            resolve_kv_cache_layout(vllm_config, [layouts], list(specs.values()))
    return specs


class _Unallocated(TorchFunctionMode):
    """Makes tensors without memory, except small ones: some models read these while they are built
    (Gemma 3n, BLOOM)."""

    _small = 1 << 12
    """In numbers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _device_constructors() and given.get("device") is None:
            made = func(*args, **given | {"device": "meta"})
            return func(*args, **given | {"device": "cpu"}) if made.numel() <= self._small else made
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            args, given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, given))
        return func(*args, **given)


def _kv_cache(vllm_config: Any, specs: Mapping[str, Any]) -> Any:
    """Make the block tables as vLLM's engine core does. vLLM 0.33 groups the layers in a separate
    call."""
    find = getattr(engine_core, "get_global_kv_cache_groups", None)
    tables = [find(vllm_config, [specs])] if find else []
    (kv_cache,) = engine_core.get_kv_cache_configs(vllm_config, [specs], [1 << 50], *tables)
    return kv_cache


@contextmanager
def _alone() -> Iterator[None]:
    """Set up vLLM's process groups with this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, Path(folder, "store").as_uri(), 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def _layers(kv_cache: Any) -> Counter[tuple[str, int, int]]:
    """See `ModelReport.layers`: in the order of vLLM's block tables."""
    counted = Counter[tuple[str, int, int]]()
    for group in kv_cache.kv_cache_groups:
        spec = group.kv_cache_spec
        kind, window = groups.kind(spec)
        kind = "again" if groups.computed_again(group) else kind
        counted[kind, window, int(spec.block_size)] += len(group.layer_names)
    return counted


def _sizes(kv_cache: Any, chunk_size: int) -> tuple[int, int]:
    """Bytes of one worker's part of a pool's chunk, and of a state. 0 if no pool can hold the
    model's chunks."""
    try:
        read = groups.read(kv_cache, chunk_size)
    except LayoutError:
        return 0, 0
    tables = kv_cache.kv_cache_groups
    tables = [group for group in tables if groups.kind(group.kv_cache_spec)[0] != "state"]
    block = max(map(_block_bytes, tables))
    return read.blocks * block, read.parts * read.blocks * block


def _block_bytes(group: Any) -> int:
    """Bytes of a block in all layers of a table."""
    specs = groups.layer_specs(group.kv_cache_spec)
    pages: int = sum(spec.page_size_bytes for spec in specs)
    return pages if len(specs) > 1 else pages * len(group.layer_names)


def main() -> None:
    """Print the findings on stdout. All other output goes to stderr."""
    name = sys.argv[1]
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        try:
            settings = config.from_dict(json.load(sys.stdin))
            found = list(findings(name, report(name, settings), settings.pool.lent))
        except Exception as error:  # noqa: BLE001
            # The outermost line of this process: the parent gets the reason.
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                why = error.errors()[0]["msg"]
            why = printable(" ".join(why.split()), MAX_LINE_CHARS)
            said = f"{printable(name)}: vLLM cannot serve it here: {why}"
            found = [fail("model", said, "start vLLM with it and see its log")]
        answer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
