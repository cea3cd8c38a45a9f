"""A connector to run beside ours under vLLM's MultiConnector: vLLM's own example, and a handshake as NIXL's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


@dataclass
class Address(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker listens."""

    port: int = 5600


class BesideConnector(ExampleConnector):  # type: ignore[misc]
    """Its scheduler takes its own workers' addresses and nothing else."""

    def get_handshake_metadata(self) -> Address:
        return Address()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        assert metadata, "no worker has said where it listens"
        assert all(isinstance(address, Address) for address in metadata.values()), metadata
