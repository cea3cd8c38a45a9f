"""The store, which is left alone for a while after failures. A background thread starts, watches
and replaces the store's process. Calls have deadlines."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from vcache_backend import threads
from vcache_backend.backoff import Backoff
from vcache_backend.config import OffloadConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.offload.objects import PROBE
from vcache_backend.offload.process import FAILED, OPEN_SECONDS, OffloadProcess, Place, StoreDown
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)


class Store:
    """Calls the store. Any thread. No failure of the store raises. Never usable in a forked child.

    `usable` turns False after `failures` failed calls in a row or the end of the process, and True
    again when the background thread has opened the store and got an answer."""

    def __init__(self, config: OffloadConfig, stats: EngineStats) -> None:
        self._config, self._stats = config, stats
        self._pid = os.getpid()
        self.memory = os.memfd_create("vcache-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memory of all buffers that calls read and write. `staging` sets the size."""
        self._process: OffloadProcess | None = None
        self._failed = 0
        """How many calls in a row have failed."""
        self._answers = False
        self._pauses = Backoff(config.retry_seconds, config.longest_pause)
        self._pause = 0.0
        """Seconds before the store is tried again."""
        self._error = ""
        self._lock = threading.Lock()
        self._tried, self._wake, self._stop = (threading.Event() for _ in range(3))
        self._keeper = threads.start(self._keep, "vcache-offload", stats.failed)

    @property
    def usable(self) -> bool:
        return self._usable_process() is not None

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the first attempt to open the store."""
        self._tried.wait(seconds)

    # ---- calls

    def lookup(self, names: Sequence[str]) -> int | None:
        """Count the leading objects that exist. None without an answer within `lookup_seconds`."""
        started, seconds = perf_counter(), self._config.lookup_seconds
        exists = names and self._call("lookup", "exist", names, seconds=seconds, kill=False)
        if not exists:
            return None
        self._stats.add_time("offload_lookup", perf_counter() - started)
        return [*exists, False].index(False)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether each object exists, within `call_seconds`. False without an answer."""
        return self._call("exist", "exist", names) or [False] * len(names)

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[int]:
        """Read objects into places, which may be larger, within `call_seconds`. Returns the bytes
        of each object: 0 if absent, -1 if unknown. After the return nothing writes into the
        memory."""
        return self._call("get", "get", names, places) or [-1] * len(names)

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[str]:
        """Write objects within `call_seconds`. Returns STORED, FULL or FAILED for each."""
        return self._call("put", "put", names, places) or [FAILED] * len(names)

    def forget(self, name: str) -> None:
        """Remove an object within `call_seconds`."""
        self._call("remove", "remove", [name], kill=False)

    def snapshot(self) -> dict[str, Any]:
        process = self._process
        pid = process.pid if process is not None and process.alive else None
        return {"process": pid, "last_error": self._error}

    def _usable_process(self) -> OffloadProcess | None:
        process = self._process
        if process is None or not (self._answers and process.alive) or os.getpid() != self._pid:
            return None
        return process

    def _call(
        self, what: str, verb: str, *arguments: Any, seconds: float = 0.0, kill: bool = True
    ) -> Any:
        """Make a call, within `seconds`, or `call_seconds`, and return its answer; None without an
        answer. what: for the counters and the log."""
        if (process := self._usable_process()) is None:
            return None
        seconds = seconds or self._config.call_seconds
        try:
            answer = process.call(verb, *arguments, seconds=seconds, kill=kill)
        except StoreDown as error:
            self._stats.failed(f"offload_{what}")
            with self._lock:
                self._failed += 1
                if self._answers and self._failed >= self._config.failures:
                    self._answers, self._pause = False, self._pauses.next()
                    self._error = str(error)
                    log.warning("the offload tier is left alone: %s: %s", what, error)
            self._wake.set()
            return None
        self._failed = 0
        return answer

    # ---- life

    def close(self) -> None:
        """Close the store. Running calls fail. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._wake.set()
        if self._process is not None:
            self._process.kill()
        self._keeper.join(1.0)
        if self.memory >= 0 and not self._keeper.is_alive():
            os.close(self.memory)
            self.memory = -1

    def _keep(self) -> bool:
        """A turn of the background thread: watch the store while it answers, otherwise try it after
        a pause. Returns whether the thread is to end."""
        with self._lock:
            # A process that ended is started again at once.
            self._answers = self._answers and self._process is not None and self._process.alive
        if self._answers:
            self._wake.wait(0.25)
            self._wake.clear()
        elif not self._stop.wait(self._pause):
            self._pause = self._pauses.next()  # also after an exception
            if self._try():
                self._pauses.reset()
                self._pause, self._failed = 0.0, 0
                self._answers = True
            self._tried.set()
        if self._stop.is_set():
            self._tried.set()
            if self._process is not None:
                self._process.kill()
        return self._stop.is_set()

    def _try(self) -> bool:
        """Start a missing process, and open the store. Returns whether the store answers."""
        try:
            if self._process is None or not self._process.alive:
                if self._process is not None:
                    self._process.end()
                self._process = OffloadProcess(self._config.mooncake, self.memory)
            if settings := self._process.call("open", seconds=OPEN_SECONDS):
                given = [f"{name}={value}" for name, value in settings.items() if value]
                log.info("Mooncake: %s", " ".join(given))
            self._process.call("exist", [PROBE], seconds=self._config.call_seconds)
        except ConfigError as error:
            log.error("no offload tier: %s", error)
            self._stop.set()
            return False
        except (OSError, VCacheError) as error:
            if self._error != str(error) and not self._stop.is_set():
                self._error = str(error)
                log.warning("no offload tier: %s", error)
            return False
        self._error = ""
        log.info("the offload tier answers")
        return True
