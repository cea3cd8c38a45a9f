"""Connectors for tests, by the names of their classes. vLLM loads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from vcache_backend.integration.vllm_connector import VCacheConnector


class Sparing(VCacheConnector):
    """As in vLLM 0.26, which does not ask a step without a model run to save anything."""

    def wait_for_save(self) -> None:
        if not self._get_connector_metadata().idle:
            super().wait_for_save()


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker listens."""

    port: int = 5600


class BesideConnector(ExampleConnector):  # type: ignore[misc]
    """To run beside ours under MultiConnector: vLLM's own example, and a handshake as NIXL's. Its scheduler takes its own workers'
    addresses and nothing else."""

    def get_handshake_metadata(self) -> Address:
        return Address()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        assert metadata, "no worker has said where it listens"
        assert all(isinstance(address, Address) for address in metadata.values()), metadata
