"""Instances of vLLM whose connector can be stopped, or made to fail, at an exact place of its code.

vLLM loads this file as the connector's module: the connector is the real one, and `vllm_cases.Serving`, which runs in the same
process, gets commands more. A place is `module:Class.method`. What happens at it is real: a test holds the process there and
meanwhile kills the server or takes chunks away.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import PATIENT, SECONDS, eventually
from vllm_cases import ANSWER_SECONDS, Answer, Instance, Node, Prompt

from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import KEY_BYTES, ChunkKey

OURS = "vcache_backend.integration.vllm"
LOOK_UP = "vcache_backend.metadata_server.client:Client.lookup"
LEASE = "vcache_backend.metadata_server.client:Client.acquire"
VIEWS = "vcache_backend.transfer.session:Session.views"
RELEASE = "vcache_backend.transfer.session:Session.verdict"
COMMIT = "vcache_backend.metadata_server.client:Client.commit"
LATE = "vcache_backend.metadata_server.client:Client._late"
SCATTER = "vcache_backend.vram_pool.copier:HostCopier.scatter"
FOREVER = 1 << 30
HELD_SECONDS = 30.0
"""How long an instance stays at a place for a test that never lets it go."""


class FailureNode(Node):
    """A node whose instances load this file as their connector."""

    flip = Node._flip

    def transfer(self, settings: dict[str, Any] | None = None, role: str = "kv_both") -> dict[str, Any]:
        quick = {"request_seconds": 0.5, "heartbeat_seconds": 0.1, "retry_seconds": 0.02, "retry_max_seconds": 0.1}
        more = {"client": quick, "pool": {"segment_bytes": "64 MiB"}, **(settings or {})}
        return {**super().transfer(more, role), "kv_connector_module_path": "vllm_failures"}

    def serve_again(self) -> None:
        """Start the server again, and wait until everybody who was connected is back, and it takes stores."""
        self.serve()
        eventually(lambda: self.stats().clients >= self.clients, ANSWER_SECONDS)
        with Client(self.socket, PATIENT, reconnect=False) as client:
            eventually(lambda: client.abort(client.reserve([ChunkKey(os.urandom(KEY_BYTES))], 4096).reservation))

    def kill(self) -> None:
        """SIGKILL for the server."""
        self.clients = self.stats().clients
        self.server.kill()


# ---- in the test's process


def healthy(instance: Instance) -> bool:
    """Does it live and answer, and is nothing meddled with?"""
    try:
        return instance.alive and instance.ask("calls", seconds=SECONDS) == {}
    except (AssertionError, OSError):
        return False


class Place:
    """Where an instance is stopped; see `stopped_at`. seen: what the method there was called with, as far as JSON can say."""

    def __init__(self, instance: Instance, file: Path) -> None:
        self._instance, self._file = instance, file
        self._pool = ThreadPoolExecutor(1)
        self.went = 0.0

    def while_there(self, act: Callable[[], Any], *prompts: Prompt) -> list[Answer]:
        """Run the prompts together, `act` once when the place is reached, and go on; the answers."""
        running = self._pool.submit(self._instance.run, *prompts, together=True)
        try:
            eventually(lambda: self._file.exists() or running.done(), ANSWER_SECONDS)
            assert self._file.exists(), "the requests are over and never came by"
            act()
        finally:
            self.go()
        return running.result(ANSWER_SECONDS)

    def go(self) -> None:
        """Let it go on. `went`: when (time.monotonic)."""
        self.went = time.monotonic()
        self._file.with_suffix(".go").touch()

    @property
    def seen(self) -> Any:
        return json.loads(self._file.read_text())

    def close(self) -> None:
        self._file.with_suffix(".go").touch()
        self._pool.shutdown()


@contextmanager
def stopped_at(instance: Instance, folder: Path, place: str, after: bool = False) -> Iterator[Place]:
    """The next call of `place` waits before its first line (after its last one), until the test lets it go."""
    file = folder / f"{instance.name}.{time.monotonic_ns()}.reached"
    instance.ask("meddle", place, "stop", str(file), 1, after)
    held = Place(instance, file)
    try:
        yield held
    finally:
        held.close()
        instance.ask("leave_alone")


@contextmanager
def meddled(instance: Instance, place: str, action: str, value: Any = None, times: int = FOREVER) -> Iterator[None]:
    """Every call of `place`, at most `times`: `raise`, `count`, or `slow` (what it returns is done `value` seconds later).

    Fails if no call came by, except of `count`. After a test that fails the instance is not `healthy`.
    """
    instance.ask("meddle", place, action, value, times, False)
    yield
    calls = instance.ask("leave_alone")
    assert calls[place] > 0 or action == "count", f"nobody called {place}"


# ---- inside an instance


class Slow:
    """A completion that says later than it could that it is over."""

    def __init__(self, copy: Any, seconds: float) -> None:
        self._copy, self._until = copy, time.monotonic() + seconds
        self.seconds: float | None = seconds

    def done(self) -> bool:
        return time.monotonic() >= self._until and bool(self._copy.done())

    def wait(self, timeout_s: float) -> bool:
        time.sleep(min(timeout_s, max(self._until - time.monotonic(), 0.0)))
        return self.done()


class Meddling:
    """Methods that are replaced, and how often each was called since."""

    def __init__(self) -> None:
        self._undo: list[tuple[type, str, Any]] = []
        self._calls: dict[str, int] = {}

    def meddle(self, place: str, action: str, value: Any, times: int, after: bool) -> bool:
        module, _, path = place.partition(":")
        owner_name, _, name = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        original = owner.__dict__[name]
        self._calls[place] = 0

        def method(*args: Any, **kwargs: Any) -> Any:
            self._calls[place] += 1
            if self._calls[place] > times or action == "count":
                return original(*args, **kwargs)
            if action == "raise":
                raise RuntimeError(f"raised in {path} on purpose")
            if action == "stop" and not after:
                _stop(Path(value), args[1:])
            answer = original(*args, **kwargs)
            if action == "slow":
                return Slow(answer, value)
            if action == "stop" and after:
                _stop(Path(value), args[1:])
            return answer

        self._undo.append((owner, name, original))
        setattr(owner, name, method)
        return True

    def calls(self) -> dict[str, int]:
        return dict(self._calls)

    def leave_alone(self) -> dict[str, int]:
        """Put everything back; how often each place was called."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        calls, self._calls = self._calls, {}
        return calls


def _stop(file: Path, arguments: tuple[Any, ...]) -> None:
    whole = file.with_suffix(".writing")
    whole.write_text(json.dumps(arguments, default=lambda value: value.hex() if isinstance(value, bytes) else repr(value)))
    whole.rename(file)
    deadline = time.monotonic() + HELD_SECONDS
    while not file.with_suffix(".go").exists() and time.monotonic() < deadline:
        time.sleep(0.002)


_main = sys.modules["__main__"]
if __name__ == "vllm_failures" and hasattr(_main, "_serve"):
    from vcache_backend.integration.vllm_connector import VCacheConnector as VCacheConnector

    _hand = Meddling()
    for _name in ("meddle", "calls", "leave_alone"):
        _method = getattr(_hand, _name)
        setattr(_main.Serving, _name, lambda self, *arguments, _method=_method: _method(*arguments))
