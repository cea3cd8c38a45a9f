"""vcache as a storage plugin of LMCache: `storage_plugins: [vcache]`, see docs/lmcache.md.

LMCache imports `VCacheBackend` from here. Modules that need neither LMCache nor vLLM can be
imported without either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import VCacheBackend

__all__ = ["VCacheBackend"]


def __getattr__(name: str) -> Any:
    """Import the backend on first use: only the backend needs LMCache."""
    if name == "VCacheBackend":
        from .backend import VCacheBackend

        return VCacheBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
