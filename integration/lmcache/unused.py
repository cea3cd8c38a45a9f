"""What LMCache's interfaces require and nobody uses: `LMCacheWorker` replaces the callers."""

from __future__ import annotations

from typing import Any, NoReturn

from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class NoGPUConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Replaces LMCache's GPU connector, which has buffers, and which LMCache lacks on a CPU."""

    def to_gpu(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            "LMCache moves memory objects where vcache moves chunks by itself; is this another "
            "version of LMCache?"
        )

    from_gpu = batched_from_gpu = batched_to_gpu = get_shape = to_gpu
