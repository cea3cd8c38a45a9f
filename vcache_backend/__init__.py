"""vcache: the inference processes of a node read each other's transformer KV caches. The library is
`VCacheEngine` and `Layout`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcache_backend.engine import VCacheEngine
    from vcache_backend.transfer.layout import Layout

__all__ = ["Layout", "VCacheEngine", "__version__"]
__version__ = "0.1.0"
_MODULES = {"VCacheEngine": "vcache_backend.engine", "Layout": "vcache_backend.transfer.layout"}


def __getattr__(name: str) -> Any:
    """Import `VCacheEngine` and `Layout` on first use: both need torch, which the server and the
    commands do not need."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
