"""One store behind a breaker: opened, watched and tried again in the background, and asked with a deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import ConfigError
from vcache_backend.offload.breaker import Breaker
from vcache_backend.offload.jobs import Job, Workers
from vcache_backend.offload.store import ObjectStore, StoreDown
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)

T = TypeVar("T")

PROBE = "vcache1/probe"
"""The name of an object that is never there."""
WATCH_SECONDS = 0.25
CLOSE_SECONDS = 1.0
_BACKLOG = 64


class Access:
    """The only way to a store. Any thread; in a forked child nothing is ever there.

    `usable` costs nothing to ask, and is False from the moment the breaker opens until the store, in the background, has been
    opened again and answered.
    """

    def __init__(self, config: OffloadConfig, store: ObjectStore, stats: EngineStats) -> None:
        self._config, self.store, self._stats = config, store, stats
        self._pid = os.getpid()
        self.breaker = Breaker(config.failures, config.retry_seconds, config.retry_max_seconds, time.monotonic)
        self._asking = Workers("vcache-offload-ask", 1, _BACKLOG)
        self._removing = Workers("vcache-offload-remove", 1, _BACKLOG)
        self._late: Job[int] | None = None
        self._suspect: Callable[[], None] | None = None
        self.on_back: Callable[[], None] = lambda: None
        """Called, in a thread of this object's, whenever the store is opened or answers again."""
        self._said = ""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="vcache-offload", daemon=True)
        self._keeper.start()

    @property
    def usable(self) -> bool:
        return self.store.is_open and not self.breaker.is_open and os.getpid() == self._pid and not self._stop.is_set()

    # ---- calls

    def ask(self, names: Sequence[str]) -> int | None:
        """How many leading objects are there, within `lookup_seconds`; None: nobody knows. A late answer counts as a failure."""
        if not names or not self.usable:
            return None
        if self._late is not None:
            # The thread that asks is still waiting for an earlier answer.
            if not self._late.done:
                self.failed("lookup", "another look-up is late already")
                return None
            self._late = None
        started = perf_counter()
        listed = list(names)
        job = self._asking.submit(lambda: self.store.contains_prefix(listed))
        if job is None:
            return None
        if not job.wait(self._config.lookup_seconds):
            self._late = job
            self.failed("lookup", f"no answer in {self._config.lookup_seconds:g} s")
            return None
        self._stats.add_time("offload_lookup", perf_counter() - started)
        if isinstance(job.error, StoreDown):
            self.failed("lookup", str(job.error))
            return None
        if job.error is not None:
            self._broken("lookup", job.error)
            return None
        self.breaker.succeeded()
        return job.result

    def call(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Make a call of the store's in this thread, one of the tier's own, for as long as it takes. A failure is `otherwise`."""
        if not self.usable:
            return otherwise
        try:
            result = call()
        except StoreDown as error:
            self.failed(what, str(error))
            return otherwise
        except Exception as error:  # noqa: BLE001 - the store's library is not ours
            self._broken(what, error)
            return otherwise
        self.breaker.succeeded()
        return result

    def forget(self, names: Sequence[str]) -> None:
        """Remove objects, soon. Look-ups neither wait for it nor learn of its failure."""
        listed = list(names)
        self._removing.submit(lambda: self._remove(listed))

    def _remove(self, names: list[str]) -> None:
        try:
            if self.usable:
                self.store.remove(names)
        except StoreDown as error:
            self._stats.failed("offload_remove")
            log.debug("remove: %s", error)

    def failed(self, what: str, why: str, again: Callable[[], None] | None = None) -> None:
        """A call failed or was late. again: what failed, to be tried before the store is trusted again; raises StoreDown."""
        self._stats.failed(f"offload_{what}")
        if again is not None:
            self._suspect = again
        if self.breaker.failed():
            log.warning("the offload tier is left alone: %s: %s", what, why)
            self._said = why
            self._wake.set()
        elif not self.store.is_open:
            self._wake.set()

    def _broken(self, what: str, error: Exception) -> None:
        if self._stats.failed(f"offload_{what}_{type(error).__name__}") == 1:
            log.warning("the offload tier: %s: %s", what, error, exc_info=error)
        self.breaker.failed()

    # ---- life

    def close(self) -> None:
        """Leave; calls under way fail. Idempotent."""
        self._stop.set()
        self._wake.set()
        try:
            self.store.close(CLOSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - the store's library is not ours
            log.debug("closing the store: %s", error)
        self._asking.close(CLOSE_SECONDS)
        self._removing.close(CLOSE_SECONDS)
        self._keeper.join(CLOSE_SECONDS)

    def _keep(self) -> None:
        """The background thread: open the store, and try it while the breaker is open."""
        pause = self._config.retry_seconds
        while not self._stop.is_set():
            if not self.store.is_open:
                if self._open():
                    pause = self._config.retry_seconds
                    continue
                self._stop.wait(pause)
                pause = min(2 * pause, self._config.retry_max_seconds)
            elif self.breaker.trial_due():
                self._try()
            else:
                self._wake.wait(WATCH_SECONDS)
                self._wake.clear()

    def _open(self) -> bool:
        try:
            self.store.open()
        except ConfigError as error:
            log.error("no offload tier: %s", error)
            self._stop.set()
            return False
        except Exception as error:  # noqa: BLE001 - as above
            if self._said != str(error) and not self._stop.is_set():
                self._said = str(error)
                log.warning("no offload tier: %s", error)
            return False
        self._said = ""
        self._try(opened=True)
        return True

    def _try(self, opened: bool = False) -> None:
        try:
            self._probe()
        except Exception as error:  # noqa: BLE001 - as above
            log.debug("trying the store: %s", error)
            self.breaker.tried(held=False)
            return
        self._suspect = None
        if self.breaker.is_open:
            log.info("the offload tier answers again")
        if opened or self.breaker.is_open:
            self.on_back()
        self.breaker.tried(held=True)

    def _probe(self) -> None:
        self.store.contains_prefix([PROBE])
        if self._suspect is not None:
            self._suspect()
