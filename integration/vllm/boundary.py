"""The layer between vLLM and vcache: no exception of ours passes it, and vLLM hears of every load
once (`ends`).

After an exception the state behind this layer may be half changed. So the connector's half in which
it was raised is out of use for good (`Boundary.off`), vLLM computes what vcache would have loaded,
and all loads for which vLLM waits end as failed. This layer does that alone: what it runs then are
the few methods of this module, and `Generations.give_up`."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client

log = logging.getLogger("vllm.vcache")
Method = TypeVar("Method", bound=Callable[..., Any])

CLOSE_SECONDS = 10.0
"""How long vLLM's shutdown waits for a half that is being closed in the background."""
AGAIN_SECONDS = 5.0
"""How often a half out of use tries to tell the server why, until a server has heard it."""


class OthersError(Exception):
    """Another connector beside ours cannot begin. Raised into vLLM, which does not start without us
    either."""


def guarded(otherwise: Callable[..., Any]) -> Callable[[Method], Method]:
    """Decorator for a method of a `Boundary`: if the half is off or the method raises anything but
    an OthersError, answer `otherwise(self, *args)`, which must not raise."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Boundary, *args: Any, **kwargs: Any) -> Any:
            if not self.off:
                try:
                    return method(self, *args, **kwargs)
                except OthersError:
                    raise
                except Exception as error:  # noqa: BLE001 - nothing of ours raises into vLLM
                    self.fail(f"{method.__name__}: {type(error).__name__}: {error}", error)
            return otherwise(self, *args, **kwargs)

        return cast(Method, call)

    return decorate


def answer(value: Any) -> Callable[..., Any]:
    """For `guarded`: answer `value`."""
    return lambda *args, **kwargs: value


class Boundary:
    """One half of the connector, as vLLM sees it. In the half's thread of vLLM.

    off: why the half is out of use, for good; empty while it is in use. config: None until it was
    read."""

    off = ""

    def __init__(self, name: str, says: bool) -> None:
        """name: of the half, for the log and the server's status. says: this half logs why the
        instance caches nothing."""
        self._name, self._says = name, says
        self.config: Config | None = None
        self._close: list[Callable[[], object]] = []
        self._closing: threading.Thread | None = None
        self._shutting = threading.Event()
        """vLLM shuts down."""

    def stop(self) -> None:
        """Called once when the half goes out of use. Afterwards other processes read nothing that
        vLLM may overwrite, and no copy of ours is running. Must not raise."""

    def on_close(self, close: Callable[[], object]) -> None:
        """Have `close` called once, when vLLM shuts down or the half goes out of use. The last
        given is called first."""
        self._close.append(close)

    def fail(self, reason: str, error: Exception | None = None) -> None:
        """Put the half out of use, and say so in vLLM's log and in the server's status. error: an
        exception that nothing of ours expected; None: there is nothing to repair here."""
        if self.off:
            return
        self.off = reason or "an error without a message"
        self.stop()
        if error is not None:
            log.error("vcache failed in %s", self._name, exc_info=error)
        if self._says:
            log.error("vcache caches nothing: %s. vLLM serves without it", self.off)
        leaving = threading.Thread(target=self._leave, name="vcache-leave", daemon=True)
        with suppress(Exception):  # no thread can be had: `close` releases everything
            leaving.start()
            self._closing = leaving

    def close(self) -> None:
        """Release everything, in vLLM's shutdown. Idempotent."""
        self._shutting.set()
        if self._closing is not None:
            self._closing.join(CLOSE_SECONDS)
            return
        self._close_all()

    def _leave(self) -> None:
        """Tell the server, now or once there is one, and release everything. In a thread, since
        both may wait."""
        told = self._tell()
        self._close_all()
        while not told and not self._shutting.wait(AGAIN_SECONDS):
            told = self._tell()

    def _tell(self) -> bool:
        """Whether there is nobody to tell any more."""
        try:
            if self.config is not None:
                with Client(self.config.server.path, self.config.client, reconnect=False) as server:
                    server.report("error", f"{self._name} caches nothing: {self.off}")
        except VCacheError as error:
            log.debug("the server was not told: %s", error)
            return False
        except Exception:
            log.exception("vcache: the server was not told")
        return True

    def _close_all(self) -> None:
        while self._close:
            close = self._close.pop()
            try:
                close()
            except Exception:
                log.exception("vcache: something could not be released")
