"""vcache: the inference processes of a node read each other's transformer KV caches. `VCacheEngine`
and `Layout` are its library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcache_backend.engine import VCacheEngine
    from vcache_backend.transfer.layout import Layout

__all__ = ["Layout", "VCacheEngine", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `VCacheEngine` and `Layout` on first use: they need torch, which the server and the
    commands do without."""
    if name == "VCacheEngine":
        from vcache_backend.engine import VCacheEngine

        return VCacheEngine
    if name == "Layout":
        from vcache_backend.transfer.layout import Layout

        return Layout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
