"""The store behind a breaker: its process is started, watched and replaced in the background, and asked with a deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.offload.breaker import Breaker
from vcache_backend.offload.client import OPEN_SECONDS, Call, OffloadProcess
from vcache_backend.offload.process import FAILED, STORED, Place, StoreDown
from vcache_backend.offload.recent import MOST_REMEMBERED, Recent
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)

PROBE = "vcache1/probe"
"""The name of an object that is never there."""
WATCH_SECONDS = 0.25
CLOSE_SECONDS = 1.0
MOST_REMOVALS = 64
"""Calls that may be under way; what is to be removed beyond that stays."""
DOUBT_SECONDS = 30.0
"""How long the master keeps the place of an object whose put was cut short. Until then it says of further puts that they are stored, and
stores nothing."""


class Store:
    """The tier's only way to its objects. Any thread; in a forked child nothing is ever there. Nothing raises for what the store does.

    `usable` costs nothing to ask, and is False from the moment the breaker opens or the process ends until the store, in the
    background, has been opened again and answered.
    """

    def __init__(self, config: OffloadConfig, stats: EngineStats) -> None:
        self._config, self._stats = config, stats
        self.on_back: Callable[[], None] = lambda: None
        """Called, in a thread of this object's, whenever the store is opened or answers again."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._process: OffloadProcess | None = None
        self._started = 0
        self._memory: list[int] = []
        self.breaker = Breaker(config.failures, config.retry_seconds, config.retry_max_seconds, time.monotonic)
        self._late: Call | None = None
        self._doubts = Recent[str](DOUBT_SECONDS, MOST_REMEMBERED, time.monotonic)
        self._removals = 0
        self._suspect: Callable[[], None] | None = None
        self._said = ""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="vcache-offload", daemon=True)
        self._keeper.start()

    @property
    def usable(self) -> bool:
        return self._open_process() is not None and not self.breaker.is_open

    def share(self, fd: int) -> int:
        """Memory of a memfd that objects are put from and got into, as places name it. The fd stays the caller's, open until `close`."""
        with self._lock:
            self._memory.append(fd)
            if self._process is not None and self._process.alive:
                self._share(self._process, fd)
            return len(self._memory) - 1

    # ---- calls

    def lookup(self, names: Sequence[str]) -> int | None:
        """How many leading objects are there, within `lookup_seconds`; None: nobody knows. A late answer counts as a failure."""
        process = self._open_process()
        if not names or process is None or self.breaker.is_open:
            return None
        if self._late is not None and not self._late.done:
            self.failed("lookup", "another look-up is late already")
            return None
        started = perf_counter()
        call = process.ask("exist", names)
        if not call.wait(self._config.lookup_seconds):
            self._late = call
            self.failed("lookup", f"no answer in {self._config.lookup_seconds:g} s")
            return None
        self._stats.add_time("offload_lookup", perf_counter() - started)
        try:
            there = call.result()
        except StoreDown as error:
            self.failed("lookup", str(error))
            return None
        self.breaker.succeeded()
        return there.index(False) if False in there else len(there)

    def get(self, names: Sequence[str], places: Sequence[Place]) -> list[int]:
        """Read objects: the bytes of each, 0 if it is not there, -1 if nobody knows. A place may be larger. For at most `call_seconds`;
        after that nothing writes into its memory."""
        if not self.usable:
            return [-1] * len(names)
        try:
            return self.try_get(names, places)
        except StoreDown as error:
            self.failed("get", str(error))
            return [-1] * len(names)

    def try_get(self, names: Sequence[str], places: Sequence[Place]) -> list[int]:
        """`get`, whatever the breaker says. Raises StoreDown."""
        return list(self._transfer("get", names, places))

    def put(self, names: Sequence[str], places: Sequence[Place]) -> list[str]:
        """Write objects: STORED, FULL or FAILED for each. As `get`."""
        if not self.usable:
            return [FAILED] * len(names)
        doubted = [name for name in names if name in self._doubts]
        try:
            answers = self._transfer("put", names, places)
            there = dict(zip(doubted, self._transfer("exist", doubted), strict=True)) if doubted else {}
        except StoreDown as error:
            self._doubts.add(names)
            self.failed("put", str(error))
            return [FAILED] * len(names)
        self._doubts.add(name for name, answer in zip(names, answers, strict=True) if answer == FAILED)
        return [
            FAILED if answer == STORED and not there.get(name, True) else answer
            for name, answer in zip(names, answers, strict=True)
        ]

    def forget(self, names: Sequence[str]) -> None:
        """Remove objects, soon. Look-ups neither wait for it nor learn of its failure."""
        process = self._open_process()
        if process is not None and self._removals < MOST_REMOVALS:
            self._removals += 1
            process.ask("remove", names, then=self._removed)

    def _removed(self, call: Call) -> None:
        self._removals -= 1
        if call.error is not None:
            self._stats.failed("offload_remove")
            log.debug("remove: %s", call.error)

    def failed(self, what: str, why: str, again: Callable[[], None] | None = None) -> None:
        """A call failed or was late. again: what failed, to be tried before the store is trusted again; raises StoreDown."""
        self._stats.failed(f"offload_{what}")
        if again is not None:
            self._suspect = again
        if self.breaker.failed():
            log.warning("the offload tier is left alone: %s: %s", what, why)
            self._said = why
        self._wake.set()

    def snapshot(self) -> dict[str, Any]:
        """For people."""
        process = self._open_process()
        return {"process": process.pid if process else None, "processes_started": self._started, "last_error": self._said}

    def _open_process(self) -> OffloadProcess | None:
        """Ours, if it can be asked."""
        process = self._process
        usable = process is not None and process.opened and process.alive and os.getpid() == self._pid and not self._stop.is_set()
        return process if usable else None

    def _transfer(self, verb: str, names: Sequence[str], places: Sequence[Place] | None = None) -> Any:
        process = self._open_process()
        if process is None:
            raise StoreDown("the store is not open")
        answer = process.call(verb, names, *([] if places is None else [places]), seconds=self._config.call_seconds)
        self.breaker.succeeded()
        return answer

    # ---- life

    def close(self) -> None:
        """Leave; calls under way fail. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._wake.set()
        process, self._process = self._process, None
        if process is not None:
            process.leave()
        if self._keeper is not threading.current_thread():
            self._keeper.join(CLOSE_SECONDS)

    def _keep(self) -> None:
        """The background thread: open the store, and try it while the breaker is open."""
        pause = self._config.retry_seconds
        while not self._stop.is_set():
            if self._open_process() is None:
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
            process = self._live_process()
            settings = process.call("open", seconds=OPEN_SECONDS)
        except ConfigError as error:
            log.error("no offload tier: %s", error)
            self._stop.set()
            return False
        except (OSError, VCacheError) as error:
            if self._said != str(error) and not self._stop.is_set():
                self._said = str(error)
                log.warning("no offload tier: %s", error)
            return False
        log.info("Mooncake: %s", " ".join(f"{name}={value}" for name, value in settings.items() if value))
        self._said, process.opened = "", True
        self._try(opened=True)
        return True

    def _live_process(self) -> OffloadProcess:
        """One that knows its store and its memory."""
        if self._process is not None and self._process.alive:
            return self._process
        process = OffloadProcess(self._config.mooncake)
        self._started += 1
        with self._lock:
            self._process = process
            for fd in self._memory:
                self._share(process, fd)
        if self._stop.is_set():
            process.kill()
        return process

    def _share(self, process: OffloadProcess, fd: int) -> None:
        """Under the lock, since the order makes the numbers."""
        try:
            process.share(fd)
        except StoreDown as error:
            log.debug("share: %s", error)
            process.kill()

    def _try(self, opened: bool = False) -> None:
        try:
            self._transfer("exist", [PROBE])
            if self._suspect is not None:
                self._suspect()
        except StoreDown as error:
            log.debug("trying the store: %s", error)
            self.breaker.tried(held=False)
            return
        self._suspect = None
        if self.breaker.is_open:
            log.info("the offload tier answers again")
        if opened or self.breaker.is_open:
            self.on_back()
        self.breaker.tried(held=True)
