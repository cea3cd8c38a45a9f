"""A connector that caches nothing. It keeps vLLM's defaults, so that a step loses next to no
time.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from ..guard import answers
from .metadata import REFUSED
from .scheduler import SchedulerSide
from .worker import WorkerSide

log = logging.getLogger("vllm.vcache")


class SilentConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and stores nothing. A `VCacheConnector` whose instance is refused becomes one for good;
    its half is still closed.
    """

    _scheduler: SchedulerSide | None = None
    _worker: WorkerSide | None = None
    failures: set[str]

    def note_failure(self, name: str, error: Exception) -> None:
        """Log a failure with its traceback, once for each call and type of exception."""
        kind = f"{name}: {type(error).__name__}"
        if kind not in self.failures:
            self.failures.add(kind)
            log.error("vcache: %s failed, which counts as a miss", name, exc_info=error)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether another instance waits for what this one computes. If not, a chunk that is not
        stored is only a later miss.
        """
        return bool(self._kv_transfer_config.kv_role == "kv_producer")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return REFUSED

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Nothing: MultiConnector may not pass it on to us. Our workers introduce themselves in
        their first step instead.
        """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded before the model run starts."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: all layers go in one launch, after the model run."""

    def wait_for_save(self) -> None:
        """Nothing."""

    @answers(None)
    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
