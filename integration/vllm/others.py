"""Another connector of vLLM beside ours: whether it fits, and what of it raises ends here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from .. import hooks
from .beside_lmcache import ALONE, BesideLoads, Transfers
from .boundary import OthersError
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

    def __init__(self, connector: Any, loads: BesideLoads = ALONE) -> None:
        """loads: for LMCache's."""
        self._it, self.name, self.off_at = connector, type(connector).__name__, 0.0
        self.tracks = hasattr(connector, "request_trackers")
        """LMCache's: notes each request's blocks, and keeps what a look-up has found from eviction
        until it hears of the blocks."""
        self._transfers: Transfers | None = None
        try:
            if getattr(connector, "worker_adapter", None):
                self._transfers = Transfers(connector, loads)
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

    def begin(self, kv_caches: dict[str, Any]) -> None:
        """`register_kv_caches`. Raises OthersError if it raises: the connector's half in the
        scheduler would go on, and might hold blocks for ever."""
        if not self.off_at:
            try:
                self._it.register_kv_caches(kv_caches)
            except Exception as error:
                said = f"{self.name} cannot begin: {type(error).__name__}: {error}"
                raise OthersError(said) from error

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """Put the connector out of use."""
        if not self.off_at:
            self.off_at = monotonic()
            line = "%s is out of use: %s. vLLM serves without it until it is restarted"
            log.error(line, self.name, reason, exc_info=error)
            if self._transfers is not None:
                self._transfers.end()

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
