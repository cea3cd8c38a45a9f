"""What lies at a LoRA adapter's path, for both integrations: chunks outlive an adapter that is trained again into the same folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .weights import located

log = logging.getLogger("vllm.vcache")

MOST = 8192
"""Names and numbers remembered; those that were seen first are forgotten."""


class Adapters:
    """The adapters of one instance's requests, as each was when it was first asked for. In the scheduler's thread.

    vLLM's workers know an adapter by its number, and read its files when a request first needs it, and again when it had been put out of
    memory; its own prefix cache knows it by its name, from 0.31 on with its path. So where files change, or a number or a name is given
    to another adapter, nobody knows with which weights KV there was computed.
    """

    def __init__(self) -> None:
        self._first: dict[object, tuple[object, str, str] | None] = {}
        """By number, and as vLLM's prefix cache knows it: that, path and content; None of more than one."""

    def content(self, lora_request: Any) -> str:
        """Names, sizes and times of its files as text, or the commit of the hub's cache; empty if its KV must not be shared: its files
        are not to be seen from here, or vLLM may take another one's KV for its."""
        number, known_as, path = lora_request.lora_int_id, _known_as(lora_request), lora_request.lora_path
        adapter = known_as, path, _content(path)
        if not adapter[-1]:
            log.debug("adapter %s: nothing to be seen at %s; its requests are not cached", lora_request.lora_name, path)
            return ""
        before = self._first.get(number)
        if getattr(lora_request, "load_inplace", False) and before != adapter:
            # Requests of the one before may still run, with these weights.
            self._first |= {before[0]: None} if before else {}
            self._first.pop(number, None)
        for key in (number, known_as):
            while len(self._first) >= MOST and key not in self._first:
                del self._first[next(iter(self._first))]
            self._first.setdefault(key, adapter)
        found = self._first[number], self._first[known_as]
        if found == (adapter, adapter):
            return adapter[-1]
        if any(found):
            log.warning(
                "adapter %s (%d): its files at %s have changed since vLLM first served it, or it has another one's number or name; it is "
                "not cached any more. Load it from a new path, before vLLM 0.31 under a new name as well, or start vLLM again",
                *(lora_request.lora_name, number, path),
            )
        self._first |= {number: None, known_as: None}
        return ""


def _known_as(lora_request: Any) -> object:
    """What vLLM's own prefix cache tells it apart by."""
    ask = getattr(sys.modules.get("vllm.v1.core.kv_cache_utils"), "_gen_lora_extra_hash_keys", None)
    return tuple(ask(SimpleNamespace(lora_request=lora_request))) if ask is not None else (lora_request.lora_name,)


def _content(path: str) -> str:
    """As vLLM finds it: a path, or else a repository of the hub, of which there may be a copy in the hub's cache."""
    try:
        found = located(str(Path(path).expanduser()))
        if found is None and not path.startswith(("/", "~")):
            hub: Any = sys.modules.get("huggingface_hub")
            config = hub.try_to_load_from_cache(path, "adapter_config.json") if hub is not None else None
            found = located(str(Path(config).parent)) if isinstance(config, str) else None
    except (OSError, ValueError, RuntimeError):  # no such user's home; no name of a repository
        return ""
    return "@".join(found) if found is not None else ""
