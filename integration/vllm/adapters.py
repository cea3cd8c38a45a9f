"""What lies at a LoRA adapter's path, for both integrations: chunks outlive an adapter that is trained again into the same folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from .weights import located

log = logging.getLogger("vllm.vcache")

MOST = 4096
"""Adapters remembered; those that were seen first are forgotten."""


class Adapters:
    """The adapters of one instance's requests, as each was when it was first asked for. In the scheduler's thread.

    vLLM reads an adapter's files when a request first needs it, and again when it had been put out of memory. So of an adapter whose
    files changed since, nobody knows with which weights its KV is computed.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, int], str] = {}

    def content(self, lora_request: Any) -> str:
        """Names, sizes and times of its files as text, or the commit of the hub's cache; empty if its KV must not be shared: its files
        are not to be seen from here, or they have changed."""
        adapter = lora_request.lora_name, lora_request.lora_path, getattr(lora_request, "lora_int_id", 0)
        found = _content(lora_request.lora_path)
        if adapter not in self._first:
            if not found:
                log.debug("adapter %s: nothing to be seen at %s; its requests are not cached", *adapter[:2])
                return ""
            if len(self._first) >= MOST:
                del self._first[next(iter(self._first))]
            self._first[adapter] = found
        elif found != self._first[adapter] != "":
            log.warning(
                "adapter %s: the files at %s have changed since vLLM first served it; its requests are not cached any more. "
                "Load it anew, under another id or path, or start vLLM again",
                *adapter[:2],
            )
            self._first[adapter] = ""
        return self._first[adapter]


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
