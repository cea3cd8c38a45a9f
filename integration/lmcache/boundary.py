"""The boundary between our code and LMCache or vLLM: whatever of ours raises stays on our side.

Imports neither vLLM nor LMCache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING, Any

from vcache_backend.errors import ConfigError, VCacheError

from ..hooks import replace

if TYPE_CHECKING:
    from vcache_backend.config import Config

log = logging.getLogger(__name__)

THEIRS = object()
"""The answer of our part of a call that the original is to answer."""
AGAIN_SECONDS = 5.0
"""How often the report is repeated until a server has taken it."""


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
        self, owner: Any, name: str, ours: Callable[..., Any], wanted: str = "", **rest: Any
    ) -> None:
        """Replace `owner.name` (see `hooks.replace`): `ours` answers, or returns `THEIRS`. rest:
        `off` and `nothing` of `run`; by default the original answers."""
        rest.setdefault("nothing", THEIRS)

        def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                answer = self.run(ours, *given, **rest, **named)
                return theirs(*given, **named) if answer is THEIRS else answer

            return call

        replace(owner, name, make, wanted)

    def behind(self, owner: Any, name: str, ours: Callable[..., Any], off: Any) -> None:
        """Replace `owner.name`: `ours` answers, with the original's answer as further first
        argument. off: of `run`."""

        def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                answer = theirs(*given, **named)
                return self.run(ours, answer, *given, off=off, nothing=answer, **named)

            return call

        replace(owner, name, make)

    def changing(self, owner: Any, name: str, change: Callable[..., Any], wanted: str) -> None:
        """Replace `owner.name`: the original gets `change` of its first argument, also while this
        half shares nothing."""

        def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def call(first: Any, *given: Any, **named: Any) -> Any:
                changed = self.run(change, first, off=change, nothing=first)
                return theirs(changed, *given, **named)

            return call

        replace(owner, name, make, wanted)

    def give_up(self, ours: object, error: Exception) -> None:
        """Share nothing any more: `ours` has raised `error`. Never raises."""
        name = getattr(getattr(ours, "func", ours), "__qualname__", str(ours))
        if self.off:
            log.debug("vcache: %s raised again", name, exc_info=error)
            return
        self.off = f"{name}: {type(error).__name__}: {error}"
        log.error(
            "vcache: an error of vcache's own (%s), so LMCache's %s shares nothing any more. vLLM "
            "serves; restart it to share again, and please report this",
            *(self.off, self.half),
            exc_info=error,
        )
        for act in self.on_off:
            with suppress(Exception):
                act(self.off)
        with suppress(Exception):
            Thread(target=self._tell, name="vcache-report", daemon=True).start()

    def _tell(self) -> None:
        """Report to the server, once there is one. In a thread: the caller may be in a step."""
        who = f"LMCache's {self.half} (pid {os.getpid()})"
        while self.config is not None:
            try:
                return tell_server(self.config, f"nothing is shared any more in {who}: {self.off}")
            except VCacheError as error:
                log.debug("the server was not told: %s", error)
                sleep(AGAIN_SECONDS)


def settings_of(config: Any) -> Config:
    """Our settings, `vcache` in the `extra_config` of LMCache's configuration: the same sections as
    in `kv_connector_extra_config` for our own connector. Of `connector` LMCache's plugin uses
    `model` and `start_server`. Adopts LMCache's chunk size.

    ConfigError names an unknown key, an impossible value, or another chunk size."""
    from ..vllm import settings

    extra, size = config.extra_config or {}, config.chunk_size
    source = "vcache in LMCache's extra_config"
    given = extra.get("vcache", {})
    flat = [key for key in extra if str(key).startswith("vcache.")]
    if flat or not isinstance(given, Mapping):
        wrong = flat[0] if flat else f"vcache is {given!r}"
        raise ConfigError(f"LMCache's extra_config: {wrong}: write `vcache:` and sections under it")
    read = settings.read(given, source, {"engine": {"chunk_size": size}})
    if read.connector.share == "in_place":
        raise ConfigError(f"{source}: connector.share is in_place: LMCache has a pool only")
    if (ours := read.engine.chunk_size) != size:
        other = f"engine.chunk_size is {ours} but LMCache's chunk_size is {size}, which is used"
        raise ConfigError(f"{source}: {other}: remove ours")
    return read


def tell_server(config: Any, text: str) -> None:
    """Report an error to the metadata server that LMCache's configuration names. VCacheError."""
    from vcache_backend.config import load
    from vcache_backend.protocol.client import Client

    try:
        ours = settings_of(config)
    except ConfigError:
        ours = load()  # at least the default socket
    with Client(ours.server.path, ours.client, reconnect=False) as client:
        client.report("error", text)


SCHEDULER, WORKER = LMCacheBoundary("scheduler"), LMCacheBoundary("worker")
"""The two halves, of which this process may have one or both."""
