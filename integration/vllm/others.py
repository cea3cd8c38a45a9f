"""Another connector of vLLM beside ours: whether it fits, and what of it raises ends here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from .. import hooks
from .model import compat

log = logging.getLogger("vllm.vcache")

ANSWERS: dict[str, Callable[[], Any]] = {
    "get_num_new_matched_tokens": lambda: (0, False),
    "get_loaded_kv_cache_group_ids": tuple,
    "request_finished": lambda: (False, None),
    "request_finished_all_groups": lambda: (False, None),
    "take_events": tuple,
    "get_transfer_results": compat.transfer_results,
    "get_block_ids_with_load_errors": set,
}
"""What a connector that is out of use answers, where vLLM does not take None."""


class Guarded:
    """Another connector. If it raises, it is out of use for good: it has nothing and does nothing
    more. In the thread of its half of vLLM. off_at: since when (time.monotonic); 0: it is in
    use."""

    def __init__(self, connector: Any) -> None:
        self._it, self.name, self.off_at = connector, type(connector).__name__, 0.0
        self.tracks = hasattr(connector, "request_trackers")
        """LMCache's: notes each request's blocks, and keeps what a look-up has found from eviction
        until it hears of the blocks."""
        try:
            if adapter := getattr(connector, "worker_adapter", None):
                _fence_stores(adapter)
        except hooks.Changed as error:
            self.fail(str(error))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """vLLM names statistics by it."""
        return type(self._it)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._it, name)
        if not callable(method):
            return method
        otherwise = ANSWERS.get(name, lambda: None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.off_at or name == "shutdown":
                try:
                    return getattr(self._it, name)(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - it would end the engine
                    self.fail(f"{name}: {type(error).__name__}: {error}", error)
            return otherwise()

        self.__dict__[name] = call
        return call

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """Put the connector out of use."""
        if not self.off_at:
            self.off_at = monotonic()
            line = "%s is out of use: %s. vLLM serves without it until it is restarted"
            log.error(line, self.name, reason, exc_info=error)

    def forget_answers(self, name: str) -> None:
        """Before LMCache is asked about a request, which has no blocks yet. Below 0.5.6 it takes
        the sum of its answers for what it has stored, and stores the rest only."""
        if (tracker := self._it.request_trackers.get(name)) is not None:
            tracker.num_stored_tokens = 0

    def ends_failed_loads(self, name: str) -> bool:
        """Whether LMCache does without its load of a request that has failed. Below 0.5.5 it would
        load for ever, or store out of the load's blocks, which are somebody else's by then."""
        tracker = self._it.request_trackers.get(name)
        return hasattr(type(getattr(tracker, "state", None)), "BYPASS_LMCACHE")

    def poll(self, finished: set[str]) -> Any:
        """`get_transfer_results`, also of transfers under way when the connector went out of
        use."""
        if self.off_at:
            with suppress(Exception):
                return self._it.get_transfer_results(finished)
        return self.get_transfer_results(finished)


def misfits(kinds: Iterable[type], hybrid: bool) -> Iterator[str]:
    """Why connectors of these classes cannot stand beside ours. hybrid: vLLM's hybrid KV cache
    manager is on."""
    for kind in kinds:
        if hybrid and not supports_hma(kind):
            how = "add --disable-hybrid-kv-cache-manager"
            yield f"{kind.__name__} does not know vLLM's hybrid KV cache manager: {how}"
        if kind.__name__ == "OffloadingConnector" and not compat.tells_of_sleep():
            yield "OffloadingConnector beside VCacheConnector needs vLLM 0.33"


def _fence_stores(adapter: Any) -> None:
    """Keep LMCache's server from taking for written what this worker has not written.

    Through shared memory LMCache (0.5.3 to 0.5.6) stores in the background, right into the memory
    of its server. A late store would write to the memory of a server that has died and commit to
    the next one; and what is not committed, a server commits when the worker unregisters."""

    def registers(theirs: Callable[..., Any]) -> Callable[..., None]:
        def register(*args: Any, **kwargs: Any) -> None:
            if old := getattr(adapter.transfer_ctx, "_engine_driven_context", None):
                # What is under way there fails, and raises nothing: a load may be, in vLLM's
                # thread.
                old.commit_store = lambda *_: False
                old._build_slot_tensors = lambda _: None
            theirs(*args, **kwargs)
            new = getattr(adapter.transfer_ctx, "_engine_driven_context", None)
            if type(new).__name__ == "EngineDrivenContextPickle":
                how = "start its server with --no-l1-use-lazy and --shm-name (docs/lmcache.md)"
                log.warning("LMCache pickles KV, which is slow: %s", how)

        return register

    def leaves(theirs: Callable[[], Any]) -> Callable[[], None]:
        def leave() -> None:
            if hasattr(adapter.transfer_ctx, "_engine_driven_context"):
                adapter.instance_id = adapter.transfer_ctx._instance_id = 0  # nobody's
            theirs()

        return leave

    hooks.replace(adapter, "_send_register_kv_caches_request", registers)
    hooks.replace(adapter, "shutdown", leaves)


def maps(other: Any) -> bool:
    """Whether LMCache's server would map the KV cache itself, by CUDA's older handles, which do not
    fit memory that vcache exports."""
    told: Mapping[str, Any] = other._kv_transfer_config.kv_connector_extra_config or {}
    mode = told.get("lmcache.mp.mp_transfer_mode", os.environ.get("LMCACHE_MP_TRANSFER_MODE"))
    return "LMCacheMP" in type(other).__name__ and mode != "engine_driven"
