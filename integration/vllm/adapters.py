"""Identifies LoRA adapters by their files, for both integrations: a folder may get a new
adapter."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from ..hooks import observe
from .model.weights import located

log = logging.getLogger("vllm.vcache")

MOST = 8192
"""Names and numbers remembered. Further ones replace the least recently used: vLLM's workers keep
fewer adapters."""


class Adapters:
    """Remembers each adapter as it was when vLLM first read it. Runs in the scheduler's thread.

    vLLM's workers identify an adapter by number. They read its files when it is added to the
    engine, otherwise at the first request, and again after eviction from memory. vLLM's prefix
    cache identifies an adapter by name and path. If the files change, or another adapter gets the
    number or name, nobody knows which weights computed the KV: the adapter is no longer cached."""

    def __init__(self) -> None:
        _all.add(self)
        if (core := sys.modules.get("vllm.v1.engine.core")) is not None:
            # The second look notices files that change during the call.
            ways = {"before": _look(Adapters.content), "after": _look(Adapters.added)}
            observe(core.EngineCore, "add_lora", "lora_request", **ways)
        self._first: dict[object, tuple[object, str, str] | None] = {}
        """By number, and by the prefix cache's name: (this name, path, content). None once a number
        or name has stood for several adapters."""

    def content(self, lora_request: Any) -> str:
        """Return the adapter's content as text: a digest of file names, sizes and times, or the
        commit in the hub's cache.

        Empty if the adapter's KV must not be shared: the files cannot be read here, or vLLM may
        confuse the adapter with another."""
        number = lora_request.lora_int_id
        known_as = _known_as(lora_request)
        path = lora_request.lora_path
        adapter = known_as, path, _content(path)
        before = self._first.get(number)
        if getattr(lora_request, "load_inplace", False) and before != adapter:
            # Requests that began with the earlier weights may now run with the new weights.
            self._first |= {before[0]: None} if before else {}
            self._first.pop(number, None)
        for key in (number, known_as):
            first = self._first.pop(key, adapter)
            while len(self._first) >= MOST:
                del self._first[next(iter(self._first))]
            self._first[key] = first
        remembered = self._first[number], self._first[known_as]
        if remembered == (adapter, adapter):
            return adapter[-1]
        if any(remembered):
            log.warning(
                "adapter %s (%d): its files at %s have changed since vLLM first served it, or "
                "another adapter has had its number or name; it is not cached any more. Load it "
                "from a new path, or restart vLLM",
                *(lora_request.lora_name, number, path),
            )
        self._first |= {number: None, known_as: None}
        return ""

    def added(self, lora_request: Any) -> None:
        """Look again at an adapter without files: vLLM may have fetched the files to add the
        adapter."""
        first = self._first.get(lora_request.lora_int_id)
        if first is not None and not first[-1] and self._first[first[0]] == first:
            del self._first[lora_request.lora_int_id], self._first[first[0]]
            self.content(lora_request)


_all: WeakSet[Adapters] = WeakSet()


def _look(does: Callable[[Adapters, Any], object]) -> Callable[..., None]:
    """Have all `Adapters` of this process look at an adapter that an engine adds or replaces, in
    its scheduler's thread, between two steps."""

    def look(engine: Any, lora_request: Any, *_: Any, **__: Any) -> None:
        for adapters in list(_all):
            does(adapters, lora_request)

    return look


def _known_as(lora_request: Any) -> object:
    """The adapter's identity in vLLM's own prefix cache."""
    ask = getattr(sys.modules.get("vllm.v1.core.kv_cache_utils"), "_gen_lora_extra_hash_keys", None)
    return (
        tuple(ask(SimpleNamespace(lora_request=lora_request)))
        if ask is not None
        else (lora_request.lora_name,)
    )


def _content(path: str) -> str:
    """Identify the files that vLLM finds at `path`, a folder or a repository in the hub's cache.
    Empty if absent."""
    try:
        identity = located(str(Path(path).expanduser()))
        if identity is None and not path.startswith(("/", "~")):
            hub: Any = sys.modules.get("huggingface_hub")
            config = (
                hub.try_to_load_from_cache(path, "adapter_config.json") if hub is not None else None
            )
            identity = located(str(Path(config).parent)) if isinstance(config, str) else None
    except (OSError, ValueError, RuntimeError):  # no such user's home; no name of a repository
        return ""
    return "@".join(identity) if identity is not None else ""
