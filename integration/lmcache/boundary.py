"""The boundary between our code and LMCache or vLLM: whatever of ours raises stays on our side.

Imports neither vLLM nor LMCache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from vcache_backend.config import Config, load, over_file
from vcache_backend.errors import ConfigError

from ..hooks import replace
from ..vllm.boundary import Boundary

THEIRS = object()
"""The answer of our part of a call that the original is to answer."""


class LMCacheBoundary(Boundary):
    """Calls our code for LMCache and vLLM, in one half (scheduler or worker) of a process. Any
    thread.

    After the first exception of our code nobody knows the state behind it, so this half is out of
    use for the rest of the process's life: our code is not called any more, except parts given as
    `off`, which do what keeps wrong KV from being used. LMCache's and vLLM's originals are called
    exactly once, and their results and exceptions pass through.

    on_off: called with the reason."""

    def __init__(self, half: str) -> None:
        super().__init__(f"LMCache's {half}", says=True)
        self.on_off: list[Callable[[str], object]] = []

    def stop(self) -> None:
        for act in self.on_off:
            with suppress(Exception):
                act(self.off)

    def adopt(self, lmcache_config: Any) -> None:
        """Learn which server to tell. Never raises."""
        with suppress(Exception):
            self.config = load()  # at least the default socket
            self.config = settings_of(lmcache_config)

    def run(
        self,
        ours: Callable[..., Any],
        *given: Any,
        off: Callable[..., Any] | None = None,
        nothing: Any = None,
        **named: Any,
    ) -> Any:
        """Call `ours`. If it raises, or this half is out of use: call `off`. If that raises, or is
        missing: return `nothing`. Never raises."""
        for part in (None if self.off else ours, off):
            try:
                if part is not None:
                    return part(*given, **named)
            except Exception as error:  # noqa: BLE001 - the outermost line of ours
                self.raised(part, error)
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
        half is out of use."""

        def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
            def call(first: Any, *given: Any, **named: Any) -> Any:
                changed = self.run(change, first, off=change, nothing=first)
                return theirs(changed, *given, **named)

            return call

        replace(owner, name, make, wanted)

    def raised(self, ours: object, error: Exception) -> None:
        """Put this half out of use: `ours` has raised `error`. Never raises."""
        name = getattr(getattr(ours, "func", ours), "__qualname__", str(ours))
        self.fail(f"{name}: {type(error).__name__}: {error}", error)


def settings_of(config: Any) -> Config:
    """Our settings, `vcache` in the `extra_config` of LMCache's configuration: the same sections as
    in `kv_connector_extra_config` for our own connector. Of `connector` LMCache's plugin uses
    `model` and `start_server`. Adopts LMCache's chunk size.

    ConfigError names an unknown key, an impossible value, or another chunk size."""
    extra, size = config.extra_config or {}, config.chunk_size
    source = "vcache in LMCache's extra_config"
    given = extra.get("vcache", {})
    flat = [key for key in extra if str(key).startswith("vcache.")]
    if flat or not isinstance(given, Mapping):
        wrong = flat[0] if flat else f"vcache is {given!r}"
        raise ConfigError(f"LMCache's extra_config: {wrong}: write `vcache:` and sections under it")
    read = over_file(given, source, {"engine": {"chunk_size": size}})
    if read.connector.share == "in_place":
        raise ConfigError(f"{source}: connector.share is in_place: LMCache has a pool only")
    if (ours := read.engine.chunk_size) != size:
        other = f"engine.chunk_size is {ours} but LMCache's chunk_size is {size}, which is used"
        raise ConfigError(f"{source}: {other}: remove ours")
    return read


SCHEDULER, WORKER = LMCacheBoundary("scheduler"), LMCacheBoundary("worker")
"""The two halves, of which this process may have one or both."""
