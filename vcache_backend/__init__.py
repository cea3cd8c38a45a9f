"""vcache: a node-wide pool of GPU memory for transformer KV caches. `from vcache_backend import Layout, VCacheEngine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcache_backend.engine import VCacheEngine
    from vcache_backend.transfer.layout import Layout

__all__ = ["Layout", "VCacheEngine", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The engine as a library needs torch, and the server does not: it is loaded when it is asked for."""
    if name == "VCacheEngine":
        from vcache_backend.engine import VCacheEngine

        return VCacheEngine
    if name == "Layout":
        from vcache_backend.transfer.layout import Layout

        return Layout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
