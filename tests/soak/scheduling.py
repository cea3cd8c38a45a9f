"""vLLM's own scheduler with the connector's half in it, and no model: which blocks an instance
gives a request, finds, loads and publishes is decided as in a real one.

A step is over at once; its tokens are of no importance. The metadata server is real, and so are the
tables of generations. The KV cache that is shown has eight bytes a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.processes import PATIENT
from benchmarks.vllm.instances import TINY
from benchmarks.vllm.settings import our_connector
from vcache_backend.children import MetadataServer
from vcache_backend.integration.vllm import lookups, requests, waits
from vcache_backend.integration.vllm.metadata import (
    LoadSpec,
    PublicationSpec,
    StepMetadata,
    WorkerReport,
)
from vcache_backend.integration.vllm.model.spec import ShardSpec
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import CacheShape, LayerKind, Publish
from vcache_backend.resident.own_cache import show_cache
from vcache_backend.vram_pool.exports import HostExportable

CHUNK = 256
PAGE = 8
FOREVER = 1e6
MOST_STEPS = 20_000
"""Of one request. On a machine whose cores are taken a look-up takes many."""
registry._run_in_subprocess = lambda look: look()
"""To look at one class it would import vLLM in another process."""
_KV = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
_numbers = itertools.count()


# ---- block tables


def full(block: int = 16, **other: Any) -> Any:
    """other: fields of vLLM's, here and below."""
    return FullAttentionSpec(**{"block_size": block} | _KV | other)


def window(tokens: int, block: int = 16, **other: Any) -> Any:
    """Layers that attend to the last `tokens` tokens."""
    return SlidingWindowSpec(**{"block_size": block, "sliding_window": tokens} | _KV | other)


def local(tokens: int, block: int = 16, **other: Any) -> Any:
    """Layers that attend within chunks of `tokens` tokens."""
    chunk = {"attention_chunk_size": tokens}
    return ChunkedLocalAttentionSpec(**{"block_size": block} | chunk | _KV | other)


def state(block: int = 16, checkpoints: bool = False, **other: Any) -> Any:
    """Layers that keep a state: Mamba, gated delta nets, short convolutions. checkpoints: a step
    also saves the state before the prompt's last block, as kernels for GPUs do."""
    kept: dict[str, Any] = {"shapes": ((2, 3),), "dtypes": (torch.float32,)}
    kept |= {"mamba_cache_mode": "align"}
    if checkpoints:
        kept |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": block}
    return MambaSpec(block_size=block, **kept | other)


class Tables(NamedTuple):
    """A model's block tables, and vLLM's `prefix_cache_retention_interval`."""

    specs: Sequence[Any]
    retention: int | None = 0

    def config(self, blocks: int) -> Any:
        groups = [
            KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(self.specs)
        ]
        more = {"prefix_cache_retention_interval": self.retention}
        return KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=groups, **more)


# ---- instances


class Place(NamedTuple):
    """Where instances are made: the server's socket, and the folder of a model."""

    socket: Path
    model: Path


@contextmanager
def place(socket: Path, folder: Path) -> Iterator[Place]:
    """No model runs, so the time of steps says nothing: nobody asks twice, or gives up."""
    patient = {
        lookups: ("LATE_SECONDS", "PROMISED_SECONDS"),
        requests: ("FRESH_SECONDS",),
        waits: ("UNKNOWN_CHUNK_SECONDS", "LONGEST_CHUNK_SECONDS"),
    }
    found = [(room, name) for room, names in patient.items() for name in names]
    found = [(room, name) for room, name in found if hasattr(room, name)]
    before = [getattr(room, name) for room, name in found]
    for room, name in found:
        setattr(room, name, 60.0)
    try:
        yield Place(socket, TINY.write_model(folder / "model"))
    finally:
        for (room, name), value in zip(found, before, strict=True):
            setattr(room, name, value)


@contextmanager
def serving() -> Iterator[Place]:
    """The same, with a metadata server of its own."""
    with TemporaryDirectory(prefix="vcache-planned-") as folder:
        socket = Path(folder, "vcache.sock")
        with (
            MetadataServer(socket, Path(folder, "server.log")),
            place(socket, Path(folder)) as made,
        ):
            yield made


class Planned:
    """vLLM's scheduler with our half in it, and no worker. The tests' engines are such, too."""

    def __init__(
        self,
        undo: ExitStack,
        transfer: dict[str, Any],
        model: Path,
        tables: Tables,
        blocks: int,
        arguments: dict[str, Any],
        kind: type[Scheduler] = Scheduler,
    ) -> None:
        """transfer: `kv_transfer_config`. blocks: of the KV cache. arguments: of vLLM's
        `EngineArgs`. RuntimeError if the connector refuses the model."""
        given = {"model": str(model), "skip_tokenizer_init": True, "max_num_seqs": 4}
        given |= {"block_size": max(spec.block_size for spec in tables.specs)}
        given |= {
            "kv_cache_memory_bytes": 1 << 20,
            "kv_transfer_config": KVTransferConfig(**transfer),
        }
        config = EngineArgs(**given | arguments).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.prefix_cache_retention_interval = tables.retention
        # vLLM does so on GPUs only.
        config.scheduler_config.async_scheduling = kind is not Scheduler
        if any(isinstance(spec, MambaSpec) for spec in tables.specs):
            config.cache_config.mamba_cache_mode = "align"
        caches = tables.config(blocks)
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
        hash_ = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_)
        self.hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hash_)
        self.scheduler = kind(config, caches, StructuredOutputManager(config), *sizes)
        undo.callback(self.scheduler.connector.shutdown)
        self.half = self.scheduler.connector._half
        if self.half is None:
            raise RuntimeError(f"the connector refuses this model: {self.scheduler.connector.off}")
        lie = {"dtype": "bfloat16", "kv_layout": "x", "layers": 1, "block_size": sizes[0]}
        report = WorkerReport(shards={(0, 0): ShardSpec(pp_rank=0, tp_rank=0, **lie)})
        self.half.update(KVConnectorOutput(kv_connector_worker_meta=report))
        if not self.half.context.open():
            raise RuntimeError(self.half.context.refused)
        self._loading = dict[str, LoadSpec]()

    def request(
        self,
        tokens: list[int],
        max_tokens: int = 1,
        priority: int = 0,
        name: str = "",
        **vcache: Any,
    ) -> Any:
        """Not added yet. vcache: its wishes."""
        wishes = {"kv_transfer_params": {"vcache": vcache}}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=wishes)
        more = {"block_hasher": self.hasher, "priority": priority}
        return Request(name or f"r{next(_numbers)}", tokens, params, None, **more)

    def add(self, tokens: list[int], *given: Any, **more: Any) -> Any:
        """See `request`."""
        made = self.request(tokens, *given, **more)
        self.scheduler.add_request(made)
        return made

    def show(self, client: Client, blocks: int, undo: ExitStack) -> None:
        """Show a KV cache of so many blocks, as its worker does."""
        exported = HostExportable()
        with exported.context():
            self._memory = torch.zeros(blocks * PAGE, dtype=torch.int8)
        (region,) = exported.allocations()
        shape = CacheShape(
            device="host",
            medium="host",
            layout="x",
            kinds=[LayerKind(1, 1, PAGE, PAGE)],
            num_blocks=blocks,
            block_size=1,
            planes=[0],
            nbytes=region.nbytes,
        )
        self.name = self.half.publications.instance
        undo.callback(show_cache(client, self.name, 0, shape, region).close)

    @contextmanager
    def others_bring(self, tokens: int, waits: bool = False) -> Iterator[None]:
        """Another connector loads so many tokens of each request that begins, as MultiConnector has
        it. waits: beside the steps."""
        ours: Any = self.scheduler.connector
        matched, allocated = ours.get_num_new_matched_tokens, ours.update_state_after_alloc
        ours.get_num_new_matched_tokens = lambda *asked: (matched(*asked), (tokens, waits))[1]
        ours.update_state_after_alloc = lambda request, blocks, _: allocated(request, blocks, 0)
        yield
        ours.get_num_new_matched_tokens, ours.update_state_after_alloc = matched, allocated

    # ---- steps

    def step(self, **said: Any) -> StepMetadata:
        """See `end`."""
        output = self.scheduler.schedule()
        self.planned(output)
        self.end(output, **said)
        return output.kv_connector_metadata  # type: ignore[no-any-return]

    def planned(self, output: Any) -> None:
        """A step has been planned, and is not over."""

    def end(self, output: Any, **said: Any) -> None:
        """The step that `output` describes is over, and its worker publishes. said: what the
        worker's connector reports."""
        self.publish(self.written(output.kv_connector_metadata, said))
        ran = self.model_output(output)
        ran.kv_connector_output = KVConnectorOutput(**said) if said else None
        self.scheduler.update_from_output(output, ran)

    def finish(self, *asked: Any) -> None:
        """Steps until these requests have ended."""
        for _ in range(MOST_STEPS):
            if all(one.request_id not in self.scheduler.requests for one in asked):
                return
            self.step()
        raise TimeoutError(f"they do not end: {[(one.request_id, one.status) for one in asked]}")

    def publish(self, specs: Sequence[PublicationSpec]) -> object:
        """What a step's worker publishes."""
        raise NotImplementedError

    def model_output(self, output: Any) -> ModelRunnerOutput:
        """What a worker says of the step that `output` describes, without its connector."""
        ids = list(output.num_scheduled_tokens)
        running = [self.scheduler.requests.get(one) for one in ids]
        finished = [one and one.num_computed_tokens >= one.num_tokens for one in running]
        made = ModelRunnerOutput(ids, {one: at for at, one in enumerate(ids)})
        made.sampled_token_ids = [[self.sampled(one)] if one else [] for one in finished]
        return made

    def sampled(self, request: Any) -> int:
        """The token of a request's step."""
        return 7

    def written(self, meta: StepMetadata, said: dict[str, Any]) -> list[PublicationSpec]:
        """What a worker publishes once a step is over: blocks that it has computed, and those of
        loads that have held. said: what the worker's connector reports."""
        self._loading |= {load.request_id: load for load in meta.loads}
        report = said.get("kv_connector_worker_meta") or WorkerReport()
        over = {name: self._loading.pop(name, None) for name in said.get("finished_recving") or ()}
        held = [load for name, load in over.items() if load and name not in report.failed]
        return [*meta.publications, *(load.publication for load in held if load.publication)]


class Instance(Planned):
    """One of them, which shares in place."""

    def __init__(
        self,
        where: Place,
        undo: ExitStack,
        tables: Tables,
        blocks: int = 4000,
        arguments: dict[str, Any] | None = None,
        role: str = "kv_both",
    ) -> None:
        """See `Planned`."""
        self.tables = tables
        told = {"connector.share": "in_place", "connector.min_hit_tokens": "1"}
        # The model is written while this process runs.
        told |= {"connector.model": "tiny", "client.request_seconds": "10"}
        given = {"max_model_len": 4096, "max_num_batched_tokens": 1024} | (arguments or {})
        transfer = our_connector(where.socket, 0, CHUNK, told) | {"kv_role": role}
        super().__init__(undo, transfer, where.model, tables, blocks, given)
        self.manager = self.scheduler.kv_cache_manager
        self.client = undo.enter_context(Client(where.socket, PATIENT))
        self.show(self.client, blocks, undo)

    # ---- requests

    def own(self, tokens: list[int]) -> int:
        """How many tokens of this prompt vLLM's own cache finds. Changes nothing."""
        return int(self.manager.get_computed_blocks(self.request(tokens))[1])

    def found(self, tokens: list[int]) -> int:
        """How many tokens of this prompt a new request has from other instances, by what vLLM's
        scheduler makes of it. Nothing is loaded, and nothing of it stays: the instance has an empty
        prefix cache before and after."""
        asked = self.add(tokens, 1, store=False)
        name = asked.request_id
        for _ in range(MOST_STEPS):
            output = self.scheduler.schedule()
            scheduled = output.num_scheduled_tokens.get(name, 0)
            if scheduled or asked.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                break
            self.end(output)
        else:
            raise TimeoutError("a request got no answer")
        had: int = asked.num_computed_tokens - scheduled
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.end(output, **({} if scheduled else {"finished_recving": {name}}))
        assert not scheduled or self.scheduler.reset_prefix_cache()
        return had

    # ---- steps

    def end(self, output: Any, **said: Any) -> None:
        """Echoes what the scheduler's half asks for. RuntimeError if the connector has given up."""
        if off := self.scheduler.connector.off:
            raise RuntimeError(f"the connector has given up: {off}")
        if echoes := output.kv_connector_metadata.echoes:
            said.setdefault("kv_connector_worker_meta", WorkerReport()).echoes |= echoes
        super().end(output, **said)

    def publish(self, specs: Sequence[PublicationSpec]) -> list[int]:
        """A promise to compute it has come before, as where steps take longer. Of each, how many
        blocks the server has taken."""
        if specs:
            self.half.context.outbox.flush(PATIENT.request_seconds)
        told = (Publish(self.name, 0, spec.runs, spec.epoch) for spec in specs)
        return [self.client.publish(one) for one in told]
