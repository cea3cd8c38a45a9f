"""What is left of a connector that caches nothing: vLLM's own defaults, which take a step next to no time."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from ..guard import answers
from .metadata import REFUSED
from .scheduler import SchedulerSide
from .worker import WorkerSide

log = logging.getLogger("vllm.vcache")


class SilentConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and stores nothing. `VCacheConnector` becomes one for good where its instance is refused: its `_scheduler` or `_worker` is
    still to be closed, and that is all."""

    _scheduler: SchedulerSide | None = None
    _worker: WorkerSide | None = None
    failures: set[str]

    def note_failure(self, name: str, error: Exception) -> None:
        """Each kind of failure is said once."""
        kind = f"{name}: {type(error).__name__}"
        if kind not in self.failures:
            self.failures.add(kind)
            log.error("vcache: %s failed, which counts as a miss", name, exc_info=error)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether somebody waits for what this instance computes. Otherwise a chunk that is not stored is a miss later, nothing worse."""
        return bool(self._kv_transfer_config.kv_role == "kv_producer")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return REFUSED

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Nothing: MultiConnector hands on what one connector has, and not ours; our workers say what they hold in their first step."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a model run needs is there before it starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers go in one launch, after the model run."""

    def wait_for_save(self) -> None:
        """Nothing."""

    @answers(None)
    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
