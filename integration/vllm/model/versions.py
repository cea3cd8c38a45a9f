"""The version of the weights: its digest in chunk keys, and the engine's calls that change it. See
docs/adr/0024."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from vllm.v1.engine.core import EngineCore

from ...hooks import replace

log = logging.getLogger("vllm.vcache")
CHANGES = {"start_weight_update", "start_draft_weight_update", "update_weights"}
CHANGES |= {"finish_weight_update", "load_model", "reload_weights", "reset_weights"}
"""The calls of vLLM's workers that change weights."""


def digest(name: object) -> bytes:
    """Identify the version that a user calls `name`. Without a text, or with an empty text:
    `unknown`."""
    if not isinstance(name, str) or not name:
        return unknown()
    # JSON may bring half of a surrogate pair.
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=32, person=b"vcache-weights-1").digest()


def unknown() -> bytes:
    """Identify weights that nobody has named: no other instance has them."""
    return secrets.token_bytes(32)


def watch() -> None:
    """Make every engine of this process tell its connectors of changes of weights
    (`weights_change`) and of named versions (`weights_are`). Idempotent.

    The engine calls both in its scheduler's thread, between two steps."""
    replace(EngineCore, "set_weight_version", _after_naming, "weight_version")
    replace(EngineCore, "collective_rpc", _before_changes, "method")


def _after_naming(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def set_weight_version(self: Any, weight_version: str, *args: Any, **kwargs: Any) -> Any:
        answer = theirs(self, weight_version, *args, **kwargs)
        _tell(self, "weights_are", weight_version)
        return answer

    return set_weight_version


def _before_changes(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the call, which may fail halfway.
        if str(getattr(method, "__name__", method)) in CHANGES:
            _tell(self, "weights_change")
        return theirs(self, method, *args, **kwargs)

    return collective_rpc


def _tell(engine: Any, call: str, *given: object) -> None:
    """Call a method of the engine's connectors. Never raises."""
    try:
        for connector in _connectors(engine):
            getattr(connector, call)(*given)
    except Exception:
        log.exception("vcache was not told of a change of weights (%s)", call)


def _connectors(engine: Any) -> Iterator[Any]:
    """The engine's connectors that have these methods, also inside a MultiConnector."""
    inside = [getattr(engine.scheduler, "connector", None)]
    for connector in inside:
        inside += getattr(connector, "_connectors", ())
        if hasattr(connector, "weights_are"):
            yield connector
