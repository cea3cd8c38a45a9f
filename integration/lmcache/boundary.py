"""The boundary between our code and LMCache or vLLM: whatever of ours raises stays on our side.

Imports neither vLLM nor LMCache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from time import sleep
from typing import Any

from vcache_backend.errors import VCacheError

log = logging.getLogger(__name__)

THEIRS = object()
"""The answer of our part of a call that the original is to answer."""
AGAIN_SECONDS = 5.0
"""How often the report is repeated until a server has taken it."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


class LMCacheBoundary:
    """Calls our code for LMCache and vLLM, in one half (scheduler or worker) of a process. Any
    thread.

    After the first exception of our code nobody knows the state behind it, so this half shares
    nothing for the rest of the process's life: our code is not called any more, except parts given
    as `off`, which do what keeps wrong KV from being used. The log and the metadata server say so.
    LMCache's and vLLM's originals are called exactly once, and their results and exceptions pass
    through.

    off: why this half shares nothing; empty while it shares. config: LMCache's, once known, which
    names the server. on_off: called with the reason."""

    def __init__(self, half: str) -> None:
        self.half, self.off = half, ""
        self.config: Any = None
        self.on_off: list[Callable[[str], object]] = []
        self._lock = Lock()

    def run(
        self,
        ours: Callable[..., Any],
        *given: Any,
        off: Callable[..., Any] | None = None,
        nothing: Any = None,
        **named: Any,
    ) -> Any:
        """Call `ours`. If it raises, or this half shares nothing: call `off`. If that raises, or is
        missing: return `nothing`. Never raises."""
        for part in (None if self.off else ours, off):
            try:
                if part is not None:
                    return part(*given, **named)
            except Exception as error:  # noqa: BLE001 - the outermost line of ours
                self.give_up(part, error)
        return nothing

    def instead(
        self, theirs: Callable[..., Any], ours: Callable[..., Any], **rest: Any
    ) -> Callable[..., Any]:
        """Make a function in place of `theirs`: `ours` answers, or returns `THEIRS`. rest: `off`
        and `nothing` of `run`; by default `theirs` answers."""
        rest.setdefault("nothing", THEIRS)

        def call(*given: Any, **named: Any) -> Any:
            answer = self.run(ours, *given, **rest, **named)
            return theirs(*given, **named) if answer is THEIRS else answer

        return call

    def around(
        self,
        theirs: Callable[..., Any],
        before: Callable[..., Any] = _nothing,
        after: Callable[..., Any] = _nothing,
        before_off: Callable[..., Any] = _nothing,
        after_off: Callable[..., Any] = _nothing,
    ) -> Callable[..., Any]:
        """Make a function that calls `before`, `theirs`, and `after` with the answer of `theirs` as
        first argument. An answer of `after` other than None counts. before_off, after_off: `off` of
        `run`."""

        def call(*given: Any, **named: Any) -> Any:
            self.run(before, *given, off=before_off, **named)
            answer = theirs(*given, **named)
            ours = self.run(after, answer, *given, off=after_off, **named)
            return answer if ours is None else ours

        return call

    def changing(
        self, theirs: Callable[..., Any], change: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """Make a function that calls `theirs` with `change` of its first argument, also while this
        half shares nothing."""

        def call(first: Any, *given: Any, **named: Any) -> Any:
            changed = self.run(change, first, off=change, nothing=first)
            return theirs(changed, *given, **named)

        return call

    def give_up(self, ours: object, error: Exception) -> None:
        """Share nothing any more: `ours` has raised `error`. Never raises."""
        name = getattr(ours, "__qualname__", str(ours))
        with self._lock:
            first = not self.off
            self.off = self.off or f"{name}: {type(error).__name__}: {error}"
        if not first:
            log.debug("vcache: %s raised again", name, exc_info=error)
            return
        said = (
            "vcache: an error of vcache's own (%s), so LMCache's %s shares nothing any more. vLLM "
            "serves; restart it to share again, and please report this"
        )
        log.error(said, self.off, self.half, exc_info=error)
        for act in (*self.on_off, self._report):
            with suppress(Exception):
                act(self.off)

    def _report(self, reason: str) -> None:
        """Tell the server, in a thread of its own: the caller may be in a step."""
        if self.config is not None:
            who = f"LMCache's {self.half} (pid {os.getpid()})"
            text = f"nothing is shared any more in {who}: {reason}"
            given = self.config, text
            Thread(target=_tell, args=given, name="vcache-report", daemon=True).start()


def _tell(config: Any, text: str) -> None:
    from .startup import tell_server

    while True:
        try:
            return tell_server(config, text)
        except VCacheError as error:
            log.debug("the server was not told: %s", error)
            sleep(AGAIN_SECONDS)


SCHEDULER, WORKER = LMCacheBoundary("scheduler"), LMCacheBoundary("worker")
"""The two halves, of which this process may have one or both."""
