"""A connector and a worker for tests, by the names of their classes. vLLM loads this file."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.request import RequestStatus
from vllm.v1.worker.cpu_worker import CPUWorker


class FailingConnector(ExampleConnector):  # type: ignore[misc]
    """vLLM's own example, to run beside ours under MultiConnector, whose loads, in the step that
    needs them, all fail; it says so behind that."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        requests = self._get_connector_metadata().requests
        loads = [request.slot_mapping.tolist() for request in requests if not request.is_store]
        self.lost = {slot // self._block_size for slots in loads for slot in slots}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.__dict__.pop("lost", set())


class TalkingConnector(ExampleConnector, SupportsHMA):  # type: ignore[misc]
    """Has nothing, and reports every request in every step, and blocks that it was never given."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._seen = set[str]()

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    start_load_kv = save_kv_layer = wait_for_save = update_state_after_alloc

    def build_connector_meta(self, output: Any) -> Any:
        self._seen |= output.num_scheduled_tokens.keys() | output.finished_req_ids
        return Seen(set(self._seen))

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return True, None

    def get_transfer_results(self, _: Any) -> Any:
        names = self._connector_metadata.names
        return KVConnectorTransferResults(set(names), set(names), set(names))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(range(1, 100))


class KeepingConnector(TalkingConnector):
    """Keeps the KV of prompts that were answered, in this process: it is read once the request has
    ended, while vLLM holds its blocks, and written in the step that needs it."""

    kept: ClassVar[dict[object, list[Any]]] = {}
    """By the tokens and the salt, the block's bytes in each layer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._work = Work()

    def _keys(self, request: Any) -> list[object]:
        """Of each block in which the whole prompt's next token cannot be."""
        tokens, size = tuple(request.prompt_token_ids), self._block
        ends = range(size, request.num_prompt_tokens, size)
        return [(request.cache_salt, tokens[:end]) for end in ends]

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        found = [*takewhile(self.kept.__contains__, self._keys(request))]
        return max(len(found) * self._block - computed, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        count = external // self._block
        if count:
            (row,), keys = blocks.get_block_ids(), self._keys(request)
            first = len([*takewhile(self.kept.__contains__, keys)]) - count
            self._work.loads += zip(keys[first : first + count], row[first:], strict=False)

    def build_connector_meta(self, output: Any) -> Any:
        work, self._work = self._work, Work()
        return work

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            self._work.saves += zip(self._keys(request), block_ids[0], strict=False)
        self._work.over.add(request.request_id)
        return True, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        for key, block in self._connector_metadata.loads:
            for cache, content in zip(self._caches, self.kept[key], strict=True):
                cache[block].copy_(content)

    def get_transfer_results(self, _: Any) -> Any:
        work = self._connector_metadata
        for key, block in work.saves:
            self.kept.setdefault(key, [cache[block].clone() for cache in self._caches])
        return KVConnectorTransferResults(finished_sending=work.over)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


@dataclass
class Work(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[tuple[object, int]] = field(default_factory=list)
    saves: list[tuple[object, int]] = field(default_factory=list)
    over: set[str] = field(default_factory=set)


@dataclass
class Seen(KVConnectorMetadata):  # type: ignore[misc]
    names: set[str]


class Stage(CPUWorker):  # type: ignore[misc]
    """Of a pipeline. vLLM's own has room for what comes from the stage before only once it has
    warmed up, which it leaves out where nothing is compiled."""

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        given = runner.max_num_tokens, runner.model_config.dtype, runner.device
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(*given)
        return super().compile_or_warm_up_model()
